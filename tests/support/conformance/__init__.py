"""The conformance suite: engines, problems, and processes that run one rank each."""
