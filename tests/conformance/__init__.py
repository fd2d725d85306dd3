"""The one suite that every engine passes; see test_conformance.py."""
