"""The sequences of a batch → micro-batches, padded or packed → logprobs of their tokens under the trained model."""
