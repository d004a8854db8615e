"""Between token ids and text: detokenizing, replies, streams."""
