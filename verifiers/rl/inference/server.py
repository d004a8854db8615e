"""Classic import path: ``vf-vllm``."""

from verifiers.integrations.vllm.launch import main

__all__ = ["main"]

if __name__ == "__main__":
    main()
