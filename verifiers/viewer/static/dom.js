// Creates elements. Text becomes text nodes only, so that model output cannot inject markup.

const SVG = "http://www.w3.org/2000/svg";

// Characters that are invisible, or that reorder the surrounding text.
const HIDDEN =
  /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b\u200c\u200e\u200f\u2028-\u202e\u2060-\u206f\u3164\ufe00-\ufe0e\ufeff\uffa0\ufff9-\ufffb]|(?<!\p{Extended_Pictographic}\ufe0f?\p{Emoji_Modifier}?)\u200d|[\u{e0000}-\u{e0fff}]|[\ud800-\udfff]/gu;

const NAMES = {
  0x00: "NUL",
  0x07: "BEL",
  0x08: "BS",
  0x0d: "CR",
  0x1b: "ESC",
  0x7f: "DEL",
  0xad: "SHY",
  0x200b: "ZWSP",
  0x200c: "ZWNJ",
  0x200d: "ZWJ",
  0x200e: "LRM",
  0x200f: "RLM",
  0x2028: "LS",
  0x2029: "PS",
  0x202a: "LRE",
  0x202b: "RLE",
  0x202c: "PDF",
  0x202d: "LRO",
  0x202e: "RLO",
  0x2060: "WJ",
  0x2066: "LRI",
  0x2067: "RLI",
  0x2068: "FSI",
  0x2069: "PDI",
  0xfeff: "BOM",
};

export function nameOfHidden(character) {
  const code = character.codePointAt(0);
  return NAMES[code] ?? `U+${code.toString(16).toUpperCase().padStart(4, "0")}`;
}

// For plain strings: titles, labels.
export function visibleText(text) {
  return String(text).replace(HIDDEN, (character) => `⟨${nameOfHidden(character)}⟩`);
}

// Appends text to a node, with invisible characters as small marks.
export function appendText(node, text) {
  const string = String(text);
  let end = 0;
  for (const match of string.matchAll(HIDDEN)) {
    if (match.index > end) node.append(string.slice(end, match.index));
    const mark = document.createElement("span");
    mark.className = "hidden-character";
    mark.textContent = nameOfHidden(match[0]);
    mark.title = `U+${match[0].codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}`;
    node.append(mark);
    end = match.index + match[0].length;
  }
  if (end < string.length) node.append(string.slice(end));
}

// h("a.button", {href: "#/"}, "text", child, [children], null)
export function h(what, attributes = {}, ...children) {
  const [tag, ...classes] = what.split(".");
  return fill(document.createElement(tag || "div"), classes, attributes, children);
}

export function svg(what, attributes = {}, ...children) {
  const [tag, ...classes] = what.split(".");
  return fill(document.createElementNS(SVG, tag), classes, attributes, children);
}

function fill(node, classes, attributes, children) {
  if (classes.length) node.setAttribute("class", classes.join(" "));
  for (const [name, value] of Object.entries(attributes)) setAttribute(node, name, value);
  append(node, children);
  return node;
}

function setAttribute(node, name, value) {
  if (value === null || value === undefined || value === false) return;
  if (typeof value === "function") node.addEventListener(name.replace(/^on/, ""), value);
  else if (name === "href" && !String(value).startsWith("#")) throw new Error("links stay on these pages");
  else if (name === "src" && !SAFE_IMAGE.test(value)) throw new Error("images are part of the page");
  else if (name === "value" || name === "checked" || name === "disabled") node[name] = value;
  else if (name === "class") node.classList.add(...String(value).split(" ").filter(Boolean));
  else node.setAttribute(name, value === true ? "" : name === "href" ? value : visibleText(value));
}

export const SAFE_IMAGE = /^data:image\/(png|jpeg|gif|webp);base64,[A-Za-z0-9+/=\s]+$/;

function append(node, children) {
  for (const child of children) {
    if (child === null || child === undefined || child === false) continue;
    if (Array.isArray(child)) append(node, child);
    else if (child instanceof Node) node.append(child);
    else appendText(node, child);
  }
}

export function replace(node, ...children) {
  node.replaceChildren();
  append(node, children);
  return node;
}

export function icon(name) {
  const paths = {
    search: "M7 12.5a5.5 5.5 0 1 1 0-11 5.5 5.5 0 0 1 0 11Zm4-1.5 3.5 3.5",
    sun: "M8 5a3 3 0 1 1 0 6 3 3 0 0 1 0-6ZM8 .8v1.6M8 13.6v1.6M.8 8h1.6M13.6 8h1.6M2.9 2.9l1.1 1.1M12 12l1.1 1.1M2.9 13.1 4 12M12 4l1.1-1.1",
    moon: "M13.5 9.8A6 6 0 0 1 6.2 2.5a6 6 0 1 0 7.3 7.3Z",
    left: "m10 3-5 5 5 5",
    right: "m6 3 5 5-5 5",
    up: "m3 10 5-5 5 5",
    down: "m3 6 5 5 5-5",
    close: "m4 4 8 8m0-8-8 8",
    warning: "M8 1.8 15 14H1L8 1.8Zm0 4.4v3.6m0 2v.4",
  };
  return svg(
    "svg.icon",
    { viewBox: "0 0 16 16", "aria-hidden": "true" },
    svg("path", {
      d: paths[name],
      fill: "none",
      stroke: "currentColor",
      "stroke-width": "1.5",
      "stroke-linecap": "round",
      "stroke-linejoin": "round",
    }),
  );
}
