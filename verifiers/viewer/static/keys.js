// Keyboard shortcuts of the current page, and their list behind "?".

import { h } from "./dom.js";

let pageKeys = [];

// Shortcuts of a page: [["j", "next row", action], …]; they are removed with the page.
export function setKeys(keys) {
  pageKeys = keys;
}

export function listen(generalKeys) {
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const isTyping = event.target instanceof HTMLElement && event.target.matches("input, select, textarea");
    if (event.key === "Escape") {
      if (closeHelp()) return event.preventDefault();
      if (isTyping) return event.target.blur();
    }
    if (isTyping) return undefined;
    const found = [...pageKeys, ...generalKeys].find(([key]) => key.split(" ").includes(event.key));
    if (!found) return undefined;
    if (event.key === "Enter" && event.target instanceof HTMLElement && event.target.matches("a, button, summary"))
      return undefined;
    event.preventDefault();
    closeHelp();
    return found[2](event);
  });
}

export function toggleHelp(generalKeys) {
  if (closeHelp()) return;
  const section = (title, keys) =>
    keys.length
      ? [
          h("h3", {}, title),
          h(
            "dl",
            {},
            keys.map(([key, words]) => [
              h(
                "dt",
                {},
                key.split(" ").map((name) => h("kbd", {}, KEY_NAMES[name] ?? name)),
              ),
              h("dd", {}, words),
            ]),
          ),
        ]
      : [];
  const dialog = h(
    "div.overlay",
    { id: "help", onclick: (event) => event.target.id === "help" && closeHelp() },
    h(
      "div.dialog",
      { role: "dialog", "aria-label": "Keys", "aria-modal": "true" },
      h("h2", {}, "Keys"),
      section("This page", pageKeys),
      section("Everywhere", generalKeys),
    ),
  );
  document.body.append(dialog);
}

const KEY_NAMES = { Escape: "Esc", ArrowDown: "↓", ArrowUp: "↑", ArrowLeft: "←", ArrowRight: "→", Enter: "↵" };

function closeHelp() {
  const found = document.getElementById("help");
  found?.remove();
  return Boolean(found);
}
