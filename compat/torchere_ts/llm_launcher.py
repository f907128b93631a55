"""`ts.llm_launcher`: its command line, and the model config that it writes; it has no engine to start.

TorchServe's launcher starts its `vllm_handler` or `trt_llm_handler`, which torchere does not have.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

__all__ = ["download_model", "get_model_config", "main"]

ENGINES = {"vllm": "vllm serve {}", "trt_llm": "trtllm-serve {}"}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="ts.llm_launcher")
    add = parser.add_argument
    add("--model_name", default="model", help="Model name")
    add("--model_store", default="model_store", help="Model store")
    add("--model_id", default="meta-llama/Meta-Llama-3.1-8B-Instruct", help="Model id")
    add("--disable_token_auth", action="store_true", help="Disable token authentication")
    add("--vllm_engine.max_num_seqs", type=int, default=256, help="Max sequences in vllm engine")
    add("--vllm_engine.max_model_len", type=int, help="Model context length")
    add("--vllm_engine.download_dir", help="Cache dir")
    add("--startup_timeout", type=int, default=1200, help="Model startup timeout in seconds")
    add("--engine", default="vllm", help="LLM engine")
    add("--dtype", default="bfloat16", help="Data type")
    add("--trt_llm_engine.max_batch_size", type=int, default=4, help="Max batch size")
    add("--trt_llm_engine.kv_cache_free_gpu_memory_fraction", type=float, default=0.1, help="KV cache share")
    return parser


def get_model_config(args: argparse.Namespace, model_snapshot_path: str | None = None) -> dict[str, Any]:
    """Return the model config for a handler of your own that runs an engine.

    Raises:
        RuntimeError: the engine is unknown.
    """
    if args.engine not in ENGINES:
        raise RuntimeError("Unsupported LLM Engine")
    counts = {"minWorkers": 1, "maxWorkers": 1, "batchSize": 1, "maxBatchDelay": 100}
    timeouts = {"responseTimeout": 1200, "startupTimeout": args.startup_timeout}
    config = {**counts, **timeouts, "deviceType": "gpu", "asyncCommunication": True}
    if args.engine == "trt_llm":
        share = getattr(args, "trt_llm_engine.kv_cache_free_gpu_memory_fraction")
        handler = {"tokenizer_dir": model_snapshot_path, "engine_dir": f"{args.model_name}-engine"}
        return {**config, "handler": {**handler, "kv_cache_config": {"free_gpu_memory_fraction": share}}}
    import torch  # noqa: PLC0415  # slow

    devices = torch.cuda.device_count() or 1
    names = ("max_num_seqs", "max_model_len", "download_dir")
    engine = {name: getattr(args, f"vllm_engine.{name}") for name in names}
    handler = {
        "model_path": args.model_id,
        "vllm_engine_config": {**engine, "tensor_parallel_size": devices},
    }
    return {**config, "parallelLevel": devices, "handler": handler}


def download_model(
    model_id: str = "meta-llama/Meta-Llama-3.1-8B-Instruct",
    revision: str = "main",
    model_path: str = ".cache",
    use_auth_token: bool | str = True,
) -> str:
    """Download a model from the Hugging Face hub with `huggingface_hub`; return its folder."""
    from huggingface_hub import snapshot_download  # noqa: PLC0415  # not a dependency of torchere

    kinds = ("json", "pt", "bin", "txt", "model", "pth", "safetensors")
    return str(
        snapshot_download(
            repo_id=model_id,
            revision=revision,
            allow_patterns=[*(f"*.{kind}" for kind in kinds), "original/*"],
            cache_dir=model_path,
            token=use_auth_token,
        )
    )


def main(args: argparse.Namespace | None = None) -> None:
    """Say how to serve the model instead, and end with status 1."""
    args = args or _parser().parse_args()
    server = ENGINES.get(args.engine, ENGINES["vllm"]).format(args.model_id)
    sys.exit(
        f"ts.llm_launcher: torchere has no handler for {args.engine}; run the engine's own server beside it: "
        f"{server}"
    )
