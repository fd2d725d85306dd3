"""The TensorFlow engines that run models of Keras, and the problem that they are tried with."""

from __future__ import annotations

from dataclasses import replace

from tests.support.conformance.cases import CASES
from tests.support.conformance.problems import PROBLEMS

TF = {case.name: case for case in CASES if case.framework == "tensorflow"}
ALONE, MIRRORED = TF["tf-one-device"], TF["tf-mirrored"]
PROBLEM = replace(PROBLEMS["ragged"], steps=6)
