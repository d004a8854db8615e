"""Converting between token ids and text: prompts, detokenizing, replies, streams."""
