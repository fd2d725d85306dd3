"""Serve the run of `examples/fashion_mnist.py` with Ray Serve: images come over HTTP and are computed in batches.

    pip install "ray[serve]"
    trainwright fit examples/fashion_mnist.py
    python examples/serve_fashion_mnist.py    # answers on http://127.0.0.1:8000 until Ctrl-C

A request is a POST of {"image": 28 rows of 28 numbers from 0 to 255}. The answer has the class and the logits of all
classes. Each replica loads the newest checkpoint when it starts. On several nodes, `storage=` of the job must be where
all of them can read it.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ray import serve
from starlette.requests import Request
from starlette.responses import JSONResponse

import trainwright as tw

SHAPE = (28, 28)


@serve.deployment(num_replicas=1, max_ongoing_requests=128, ray_actor_options={"num_cpus": 1})
class Classifier:
    """The model of a finished run.

    Args:
        job: the job, or the path of its file.
    """

    def __init__(self, job: tw.Job | str) -> None:
        self.model = tw.load_model(job).eval()

    async def __call__(self, request: Request) -> JSONResponse:
        """Answer one image."""
        try:
            image = np.array((await request.json())["image"], dtype=np.uint8)
        except (KeyError, TypeError, ValueError, OverflowError):
            image = None
        if image is None or image.shape != SHAPE:
            return JSONResponse({"error": 'send {"image": 28 rows of 28 numbers from 0 to 255}'}, status_code=400)
        logits = await self.logits(image)
        return JSONResponse({"class": int(np.argmax(logits)), "logits": logits})

    @serve.batch(max_batch_size=64, batch_wait_timeout_s=0.01)
    async def logits(self, images: list[Any]) -> list[list[float]]:
        """Return the logits of each of up to 64 images that came within 10 ms; other requests are read meanwhile."""
        return await asyncio.to_thread(self._computed, np.stack(images))

    @torch.inference_mode()
    def _computed(self, images: np.ndarray) -> list[list[float]]:
        return self.model(torch.from_numpy(images)).tolist()


if __name__ == "__main__":
    serve.run(Classifier.bind(str(Path(__file__).with_name("fashion_mnist.py").absolute())), blocking=True)
