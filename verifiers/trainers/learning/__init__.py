"""The tokens of a batch → their logprobs under the model that learns: laid out, packed, and proven to be exact."""
