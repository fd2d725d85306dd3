"""Whole hosts in namespaces, each with an address, an sshd and folders of its own, on one switch: `make hosts`."""
