"""Training, and weights on disk."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from .. import records
from ..device import provenance
from . import text
from .transformer import MLATransformer, ModelConfig

FOLDER = records.DATA / "tiny_mla"

#: Weight of the draft heads' mean loss next to that of the next token.
DRAFT_WEIGHT = 0.5


def loss_of(model: MLATransformer, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cross-entropies in nats a byte: of the next token, and of each draft head
    ``[num_draft_heads]``.

    Args:
        tokens: ``[B, S]``.
    """
    hidden = model(tokens)
    following = F.cross_entropy(model.logits(hidden[:, :-1]).flatten(0, 1).float(),
                                tokens[:, 1:].flatten())
    heads = model.config.num_draft_heads
    # The hidden state at t and the root t + 1 draft the tokens t + 2 .. t + 1 + heads.
    last = tokens.shape[1] - 1 - heads
    logits = model.draft_logits(hidden[:, :last], tokens[:, 1:last + 1])
    drafted = torch.stack([
        F.cross_entropy(logits[:, :, k].flatten(0, 1).float(),
                        tokens[:, 2 + k:2 + k + last].flatten()) for k in range(heads)])
    return following, drafted


@torch.no_grad()
def held_out_loss(model: MLATransformer, held_out: bytes, length: int,
                  count: int = 128) -> tuple[float, list[float]]:
    """Bits a byte of the next token and of each draft head, on pieces of the held-out text."""
    pieces = torch.tensor(text.windows(held_out, min(count, len(held_out) // length), length),
                          device=model.embedding.weight.device)
    following, drafted = loss_of(model, pieces)
    return float(following) / math.log(2), (drafted / math.log(2)).tolist()


def train(seconds: float, *, batch_size: int = 128, length: int = 384, rate: float = 1.5e-3,
          seed: int = 0, config: ModelConfig | None = None,
          device: str | None = None) -> tuple[MLATransformer, dict, bytes]:
    """Trains a model for some time: AdamW, the rate warmed up and then falling with the cosine
    of the time spent.

    Args:
        seconds: to train; steps taken are as many as fit.
        batch_size, length: pieces a step and their bytes.
        rate: the highest learning rate.
        device: default the GPU where there is one.

    Returns:
        The model (fp32), a record of the training, and the held-out text.
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(seed)
    config = config or ModelConfig()
    model = MLATransformer(config).to(device)
    known, held_out = text.gather()
    data = torch.frombuffer(bytearray(known), dtype=torch.uint8).to(device)
    generator = torch.Generator(device=device).manual_seed(seed)
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
        lr=rate, betas=(0.9, 0.95), fused=device == "cuda")
    torch.set_float32_matmul_precision("high")
    offsets = torch.arange(length, device=device)
    curve, step, begin, told = [], 0, time.monotonic(), 0.0
    while (spent := time.monotonic() - begin) < seconds:
        share = spent / seconds
        now = rate * min(1.0, (step + 1) / 100) * (0.02 + 0.98 * 0.5 * (1 + math.cos(
            math.pi * share)))
        for group in optimizer.param_groups:
            group["lr"] = now
        at = torch.randint(len(data) - length, (batch_size, 1), device=device,
                           generator=generator)
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            following, drafted = loss_of(model, data[at + offsets].long())
        (following + DRAFT_WEIGHT * drafted.mean()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        if step % 50 == 0 and spent - told > seconds / 40:
            told = spent
            curve.append({"step": step, "seconds": round(spent, 1),
                          "bits_per_byte": float(following.detach()) / math.log(2),
                          "draft_bits_per_byte": (drafted.detach() / math.log(2)).tolist()})
            print(f"{spent:6.0f} s, step {step:6}: {curve[-1]['bits_per_byte']:.3f} bits a byte, "
                  f"draft heads {curve[-1]['draft_bits_per_byte'][0]:.2f} .. "
                  f"{curve[-1]['draft_bits_per_byte'][-1]:.2f}", file=sys.stderr, flush=True)
    model.eval()
    bits, draft_bits = held_out_loss(model, held_out, length)
    record = {
        "config": dataclasses.asdict(config),
        "arguments": {"seconds": seconds, "batch_size": batch_size, "length": length,
                      "rate": rate, "seed": seed},
        "steps": step, "curve": curve, "python": sys.version.split()[0],
        "held_out": {"bits_per_byte": bits, "draft_bits_per_byte": draft_bits},
        "text": {"what": "Python's standard library and help topics", "license": text.LICENSE,
                 "bytes": len(known), "sha256": hashlib.sha256(known).hexdigest(),
                 "held_out_bytes": len(held_out)},
        **provenance()}
    return model, record, held_out


def save(model: MLATransformer, record: dict, held_out: bytes, folder: Path = FOLDER) -> None:
    """Writes ``model.safetensors`` (bf16), ``training.json`` and the first 256 KiB of the
    held-out text, ``held_out.txt``."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.detach().to(torch.bfloat16).cpu().contiguous()
               for name, tensor in model.state_dict().items()}, folder / "model.safetensors",
              metadata={"config": json.dumps(record["config"])})
    records.write(folder / "training.json", record)
    (folder / "held_out.txt").write_bytes(held_out[:256 * 1024])


def load(folder: Path = FOLDER, *, dtype: torch.dtype = torch.float32,
         device: torch.device | str = "cpu") -> MLATransformer:
    """The trained model, for decoding.

    Raises:
        FileNotFoundError: nothing is there; the message says how to train.
    """
    path = folder / "model.safetensors"
    if not path.is_file():
        raise FileNotFoundError(f"no weights in {folder}: python -m mla_kernels.model train makes "
                                "them")
    config = ModelConfig(**json.loads((folder / "training.json").read_text())["config"])
    model = MLATransformer(config)
    model.load_state_dict(load_file(path))
    return model.to(device=device, dtype=dtype).eval().requires_grad_(False)


def held_out_text(folder: Path = FOLDER) -> bytes:
    """The held-out text that lies beside the weights."""
    return (folder / "held_out.txt").read_bytes()


def main(arguments: Sequence[str] | None = None) -> None:
    """``python -m mla_kernels.model train``."""
    import argparse

    parser = argparse.ArgumentParser(prog="python -m mla_kernels.model train",
                                     description="Train the small MLA model.")
    parser.add_argument("--seconds", type=float, default=200)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--length", type=int, default=384)
    parser.add_argument("--rate", type=float, default=1.5e-3)
    parser.add_argument("--out", type=Path, default=FOLDER)
    args = parser.parse_args(arguments)
    model, record, held_out = train(args.seconds, batch_size=args.batch_size, length=args.length,
                                    rate=args.rate)
    save(model, record, held_out, args.out)
    print(json.dumps(record["held_out"]))
