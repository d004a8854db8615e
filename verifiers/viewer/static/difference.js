// Finds the first difference of two conversations.

// {message, block, offset} for each side, or null if they are equal; block is null if a message ends early.
export function firstDifference(a, b) {
  const most = Math.max(a.length, b.length);
  for (let i = 0; i < most; i += 1) {
    if (!a[i] || !b[i]) return { message: i, block: null, offset: 0 };
    const found = blockDifference(a[i], b[i]);
    if (found) return { message: i, ...found };
  }
  return null;
}

function blockDifference(a, b) {
  if (a.role !== b.role) return { block: 0, offset: 0 };
  const most = Math.max(a.blocks.length, b.blocks.length);
  for (let i = 0; i < most; i += 1) {
    const [left, right] = [a.blocks[i], b.blocks[i]];
    if (!left || !right) return { block: i, offset: 0 };
    if (left.kind !== right.kind || left.name !== right.name || left.url !== right.url) return { block: i, offset: 0 };
    if (left.text !== right.text) return { block: i, offset: commonPrefix(left.text, right.text) };
  }
  return null;
}

export function commonPrefix(a, b) {
  let i = 0;
  while (i < a.length && i < b.length && a[i] === b[i]) i += 1;
  // Not in the middle of a surrogate pair.
  return i > 0 && /[\ud800-\udbff]/.test(a[i - 1]) ? i - 1 : i;
}
