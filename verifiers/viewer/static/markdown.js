// Renders a small subset of markdown in one pass, with text nodes only.
//
// Headings, paragraphs, lists, quotes, tables, fenced and inline code, emphasis. The URL of a link is shown as text and
// not linked; an image is named, not loaded; HTML is text. Line breaks are kept. All loops advance and depth is bounded,
// so that no text takes more than linear time or makes a deep tree.

import { appendText, h } from "./dom.js";
import { codeBlock } from "./code.js";

const DEEPEST_BLOCK = 6;
const DEEPEST_SPAN = 12;
const MOST_CELLS = 20_000;
const LONGEST_ADDRESS = 2000;
const TAG = /<\/?[a-zA-Z_][\w-]{0,40}\/?>/g;

// write(node, text): appends plain text to a node; it may mark parts of it.
export function markdownView(text, { write = writeTags } = {}) {
  const box = h("div.markdown");
  writeBlocks(box, text.split("\n"), 0, write);
  return box;
}

// Highlight the tags that a model was asked to write.
export function writeTags(node, text) {
  let end = 0;
  for (const match of text.matchAll(TAG)) {
    appendText(node, text.slice(end, match.index));
    node.append(h("span.markup", {}, match[0]));
    end = match.index + match[0].length;
  }
  appendText(node, text.slice(end));
}

// --- blocks -------------------------------------------------------------------------------------------------------------

function writeBlocks(box, lines, depth, write) {
  let i = 0;
  while (i < lines.length) {
    const line = lines[i];
    const fence = fenceOf(line);
    if (isBlank(line)) i += 1;
    else if (fence) i = writeFence(box, lines, i, fence);
    else if (isHeading(line)) i = writeHeading(box, lines, i, write);
    else if (isRule(line)) (box.append(h("hr")), (i += 1));
    else if (depth < DEEPEST_BLOCK && isQuote(line)) i = writeQuote(box, lines, i, depth, write);
    else if (depth < DEEPEST_BLOCK && itemOf(line)) i = writeList(box, lines, i, depth, write);
    else if (isTable(lines, i)) i = writeTable(box, lines, i, write);
    else i = writeParagraph(box, lines, i, depth, write);
  }
}

function isBlank(line) {
  return line.trim() === "";
}

function indentOf(line) {
  let n = 0;
  while (line[n] === " " || line[n] === "\t") n += 1;
  return n;
}

function fenceOf(line) {
  const start = indentOf(line);
  const mark = line[start];
  if (mark !== "`" && mark !== "~") return null;
  let n = start;
  while (line[n] === mark) n += 1;
  const name = line.slice(n).trim();
  return n - start >= 3 && !name.includes("`") ? { mark, size: n - start, start, name } : null;
}

function writeFence(box, lines, i, fence) {
  const found = [];
  let at = i + 1;
  for (; at < lines.length; at += 1) {
    const end = fenceOf(lines[at]);
    if (end && end.mark === fence.mark && end.size >= fence.size && !end.name) break;
    found.push(lines[at].slice(Math.min(fence.start, indentOf(lines[at]))));
  }
  box.append(codeBlock(found.join("\n"), fence.name.split(/\s/, 1)[0].slice(0, 30)));
  return at + 1;
}

function headingSize(line) {
  let n = 0;
  while (line[n] === "#") n += 1;
  return n >= 1 && n <= 6 && (line[n] === " " || line[n] === "\t") ? n : 0;
}

function isHeading(line) {
  return headingSize(line) > 0;
}

function writeHeading(box, lines, i, write) {
  const size = headingSize(lines[i]);
  box.append(spansInto(h(`p.heading.h${size}`), lines[i].slice(size).trim(), write));
  return i + 1;
}

function isRule(line) {
  const marks = line.replaceAll(" ", "");
  return marks.length >= 3 && "-*_".includes(marks[0]) && [...marks].every((mark) => mark === marks[0]);
}

function isQuote(line) {
  return line[indentOf(line)] === ">";
}

function writeQuote(box, lines, i, depth, write) {
  const inner = [];
  let at = i;
  for (; at < lines.length && isQuote(lines[at]); at += 1) {
    const rest = lines[at].slice(indentOf(lines[at]) + 1);
    inner.push(rest[0] === " " ? rest.slice(1) : rest);
  }
  const quote = h("blockquote");
  writeBlocks(quote, inner, depth + 1, write);
  box.append(quote);
  return at;
}

// "- words", "2. words" → the kind of list, and the offset of the text
function itemOf(line) {
  const start = indentOf(line);
  let n = start;
  if ("-*+".includes(line[n] ?? " ")) n += 1;
  else {
    while (line[n] >= "0" && line[n] <= "9" && n - start < 9) n += 1;
    if (n === start || (line[n] !== "." && line[n] !== ")")) return null;
    n += 1;
  }
  if (line[n] !== " " && line[n] !== "\t") return null;
  const isNumbered = n - start > 1;
  return { start, isNumbered, first: isNumbered ? Number.parseInt(line.slice(start), 10) : 1, words: n + 1 };
}

function writeList(box, lines, i, depth, write) {
  const head = itemOf(lines[i]);
  const items = [];
  let at = i;
  for (; at < lines.length; at += 1) {
    const line = lines[at];
    const item = itemOf(line);
    if (item && item.start <= head.start + 1 && item.isNumbered === head.isNumbered)
      items.push([line.slice(item.words)]);
    else if (isBlank(line)) {
      const next = lines[at + 1] ?? "";
      const goesOn = !isBlank(next) && (indentOf(next) > head.start || itemOf(next)?.isNumbered === head.isNumbered);
      if (!goesOn) break;
      items.at(-1).push("");
    } else if (indentOf(line) > head.start) items.at(-1).push(line.slice(Math.min(indentOf(line), head.words)));
    else break;
  }
  const list = h(head.isNumbered ? "ol" : "ul", { start: head.isNumbered && head.first !== 1 ? head.first : null });
  for (const item of items) {
    const node = h("li");
    writeBlocks(node, item, depth + 1, write);
    list.append(node);
  }
  box.append(list);
  return at;
}

function isTable(lines, i) {
  const marks = lines[i + 1] ?? "";
  if (!lines[i].includes("|") || !marks.includes("-") || !marks.includes("|")) return false;
  return [...marks].every((mark) => "|-: \t".includes(mark));
}

function cellsOf(line) {
  const cells = line.trim().split("|");
  if (cells[0].trim() === "") cells.shift();
  if (cells.length && cells.at(-1).trim() === "") cells.pop();
  return cells.map((cell) => cell.trim());
}

function writeTable(box, lines, i, write) {
  const head = cellsOf(lines[i]);
  const body = h("tbody");
  let at = i + 2;
  for (let cells = 0; at < lines.length && lines[at].includes("|") && cells < MOST_CELLS; at += 1) {
    const row = cellsOf(lines[at]).slice(0, head.length);
    cells += row.length + 1;
    body.append(
      h(
        "tr",
        {},
        row.map((cell) => spansInto(h("td"), cell, write)),
      ),
    );
  }
  const top = h(
    "tr",
    {},
    head.map((cell) => spansInto(h("th"), cell, write)),
  );
  box.append(h("div.markdown-table", {}, h("table", {}, h("thead", {}, top), body)));
  return at;
}

function startsBlock(lines, i, depth) {
  const line = lines[i];
  const isDeep = depth >= DEEPEST_BLOCK;
  return (
    isBlank(line) || fenceOf(line) || isHeading(line) || isRule(line) || (!isDeep && (isQuote(line) || itemOf(line)))
  );
}

function writeParagraph(box, lines, i, depth, write) {
  let at = i + 1;
  while (at < lines.length && !startsBlock(lines, at, depth) && !isTable(lines, at)) at += 1;
  box.append(spansInto(h("p"), lines.slice(i, at).join("\n"), write));
  return at;
}

// --- spans --------------------------------------------------------------------------------------------------------------

const WORD = /[\p{L}\p{N}]/u;
const SPECIAL = /[`*_~[\]!\\]/g;

function spansInto(node, text, write) {
  writePieces(node, spansOf(text), write);
  return node;
}

// Merges adjacent strings, so that a search also finds matches across them.
function writePieces(node, pieces, write) {
  let plain = "";
  for (const piece of [...pieces, null]) {
    if (typeof piece === "string") plain += piece;
    else {
      if (plain) write(node, plain);
      plain = "";
      if (piece) node.append(elementOf(piece, write));
    }
  }
}

function elementOf(piece, write) {
  if (piece.kind === "code") {
    const code = h("code");
    write(code, piece.text);
    return code;
  }
  const inner = h(TAGS[piece.kind] ?? "span.link-text");
  writePieces(inner, piece.pieces, write);
  if (piece.kind === "link" || piece.kind === "image") {
    const address = h("span.link-address");
    write(address, piece.address);
    return h(
      `span.${piece.kind}`,
      {},
      piece.kind === "image" ? "[picture: " : "",
      inner,
      " (",
      address,
      ")",
      piece.kind === "image" ? "]" : "",
    );
  }
  return inner;
}

const TAGS = { "**": "strong", __: "strong", "*": "em", _: "em", "~~": "del" };

// Text → strings and {kind, pieces}: openers stay on a stack until their closer, or become text again.
function spansOf(text) {
  const stack = [{ kind: null, marker: "", pieces: [] }];
  const codes = codeSpans(text);
  const top = () => stack.at(-1).pieces;
  const has = (kind) => stack.some((frame) => frame.kind === kind);
  let closing = -1; // the position of the next ")", searched only once
  let end = 0;
  const put = (until) => until > end && top().push(text.slice(end, until));
  SPECIAL.lastIndex = 0;
  for (let match = SPECIAL.exec(text); match; match = SPECIAL.exec(text)) {
    const at = match.index;
    const mark = match[0];
    let next = at + 1;
    if (mark === "\\" && "*_`~".includes(text[at + 1] ?? " ")) {
      put(at);
      top().push(text[at + 1]);
      next = at + 2;
    } else if (mark === "`") {
      const code = codes.get(at);
      if (!code) {
        while (text[next] === "`") next += 1;
        put(next);
      } else {
        put(at);
        top().push({ kind: "code", text: code.text });
        next = code.end;
      }
    } else if (mark === "[" || (mark === "!" && text[at + 1] === "[")) {
      if (stack.length > DEEPEST_SPAN) continue;
      put(at);
      next = at + (mark === "!" ? 2 : 1);
      stack.push({ kind: mark === "!" ? "image" : "link", marker: text.slice(at, next), pieces: [] });
    } else if (mark === "]" && text[at + 1] === "(" && (has("link") || has("image"))) {
      if (closing < at) closing = text.indexOf(")", at);
      if (closing < 0) closing = Infinity;
      const address = closing === Infinity || closing - at > LONGEST_ADDRESS ? null : text.slice(at + 2, closing);
      if (address === null || address.includes("\n")) continue;
      put(at);
      next = closing + 1;
      const frame = closeFrame(stack, (found) => found.kind === "link" || found.kind === "image");
      top().push({ kind: frame.kind, pieces: frame.pieces, address });
    } else if (mark === "*" || mark === "_" || mark === "~") {
      const size = text[at + 1] === mark ? 2 : 1;
      const kind = mark.repeat(size);
      next = at + size;
      const [before, after] = [text[at - 1] ?? " ", text[next] ?? " "];
      const isCloser = before.trim() !== "" && !WORD.test(after) && has(kind);
      const isOpener = after.trim() !== "" && after !== mark && !WORD.test(before) && stack.length <= DEEPEST_SPAN;
      if (!TAGS[kind] || (!isCloser && !isOpener)) {
        SPECIAL.lastIndex = next;
        continue;
      }
      put(at);
      if (isCloser) {
        const frame = closeFrame(stack, (found) => found.kind === kind);
        top().push({ kind, pieces: frame.pieces });
      } else stack.push({ kind, marker: kind, pieces: [] });
    } else continue;
    end = next;
    SPECIAL.lastIndex = next;
  }
  put(text.length);
  while (stack.length > 1) flatten(stack);
  return stack[0].pieces;
}

// The innermost frame of a kind; frames inside it were never closed.
function closeFrame(stack, isWanted) {
  while (!isWanted(stack.at(-1))) flatten(stack);
  return stack.pop();
}

function flatten(stack) {
  const frame = stack.pop();
  const { pieces } = stack.at(-1);
  pieces.push(frame.marker);
  for (const piece of frame.pieces) pieces.push(piece);
}

// Code spans by start, with text and end: from a run of backticks to the next run of the same length.
function codeSpans(text) {
  const runs = [];
  for (let at = text.indexOf("`"); at >= 0;) {
    let end = at;
    while (text[end] === "`") end += 1;
    runs.push({ at, size: end - at });
    at = text.indexOf("`", end);
  }
  const nextOf = new Map();
  for (let i = runs.length - 1; i >= 0; i -= 1) {
    runs[i].closer = nextOf.get(runs[i].size) ?? null;
    nextOf.set(runs[i].size, runs[i]);
  }
  const found = new Map();
  let until = 0;
  for (const run of runs) {
    if (run.at < until || !run.closer) continue;
    until = run.closer.at + run.size;
    found.set(run.at, { text: text.slice(run.at + run.size, run.closer.at), end: until });
  }
  return found;
}
