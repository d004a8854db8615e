"""Classic import path: ``vf-vllm`` of 0.1.5."""

from verifiers.integrations.vllm.launch import main

__all__ = ["main"]

if __name__ == "__main__":
    main()
