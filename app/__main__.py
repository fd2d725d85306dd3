"""`python -m trainwright`."""

from trainwright.cli.main import main

if __name__ == "__main__":
    main()
