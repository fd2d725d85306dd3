"""Generate text with the run of `examples/gpt.py`, in the layout of its training, or with --here in this process.

python examples/generate.py "And it came to pass" --tokens 100 --temperature 0.8
python examples/generate.py "In the beginning" --set size=tiny
"""

from __future__ import annotations

import argparse
from pathlib import Path

from tokenizers import Tokenizer

import trainwright as tw

GPT = Path(__file__).with_name("gpt.py")


def main() -> None:
    """Print a prompt and its continuation by the model."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("prompt")
    parser.add_argument("--tokens", type=int, default=80, help="to add")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 takes the likeliest")
    parser.add_argument("--top-k", type=int, default=50, help="draw among so many of the likeliest")
    parser.add_argument("--seed", type=int, default=0, help="the same gives the same text")
    parser.add_argument("--here", action="store_true", help="in this process, whatever layout it was trained in")
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="as the run was started with")
    given = parser.parse_args()
    job = tw.load_job(str(GPT), given.set)
    learnt = Tokenizer.from_file(f"data/king-james/tokens-{job.model.args[0].vocabulary}.json")
    prompt = learnt.encode(given.prompt).ids
    try:
        (text,) = tw.generate(
            job, [prompt], count=given.tokens, temperature=given.temperature, top_k=given.top_k, seed=given.seed,
            here=given.here,
        )  # fmt: skip
    except tw.TrainwrightError as error:
        parser.exit(1, f"{error}\n")
    print(learnt.decode(text.tolist()))


if __name__ == "__main__":
    main()
