"""`python -m trainwright`."""

from trainwright.cli import main

if __name__ == "__main__":
    main()
