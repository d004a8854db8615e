// Routes URLs to pages, and draws the parts of all pages: top bar, theme, keys.

import { ask, isEmbedded } from "./api.js";
import { embeddedData } from "./embedded.js";
import { h, icon, replace, visibleText } from "./dom.js";
import { listen, setKeys, toggleHelp } from "./keys.js";
import { comparePage } from "./page_compare.js";
import { groupPage } from "./page_group.js";
import { rolloutPage } from "./page_rollout.js";
import { runPage } from "./page_run.js";
import { runsPage } from "./page_runs.js";
import { sharesPage } from "./page_shares.js";
import { trainingPage } from "./page_training.js";

const ROUTES = [
  [/^$/, [], runsPage],
  [/^run\/(\w+)$/, ["run"], runPage],
  [/^run\/(\w+)\/training$/, ["run"], trainingPage],
  [/^run\/(\w+)\/rollout\/(\d+)$/, ["run", "number"], rolloutPage],
  [/^run\/(\w+)\/group$/, ["run"], groupPage],
  [/^run\/(\w+)\/rewards$/, ["run"], sharesPage],
  [/^compare\/(\w+(?:\/\w+)+)$/, ["runs"], comparePage],
  [/^link$/, [], linkPage],
];

const GENERAL_KEYS = [
  ["r", "the list of runs", () => (location.hash = "#/")],
  ["T", "light or dark", () => toggleTheme()],
  ["?", "these keys", () => toggleHelp(GENERAL_KEYS)],
];

let leaving = new AbortController();
const crumbs = h("nav.crumbs", { "aria-label": "where you are" });
const page = h("main", { id: "page" });

function parseHash() {
  const [path, search = ""] = location.hash.replace(/^#\/?/, "").split("?");
  return [path, Object.fromEntries(new URLSearchParams(search))];
}

async function show() {
  leaving.abort();
  leaving = new AbortController();
  const { signal } = leaving;
  const [path, query] = parseHash();
  const route = ROUTES.find(([pattern]) => pattern.test(path));
  setKeys([]);
  document.body.classList.add("loading");
  const root = h("div.page");
  const context = {
    root,
    signal,
    query,
    path,
    params: {},
    // Ignore the result if the user has left the page meanwhile.
    crumbs: (parts) => signal.aborted || drawCrumbs(parts),
    keys: (keys) => signal.aborted || setKeys(keys),
    go: (hash) => (location.hash = hash),
  };
  context.update = (changes, options) => updateHash(context, changes, options);
  drawCrumbs([]);
  try {
    if (!route) throw new Error("There is no such page.");
    const [pattern, names, render] = route;
    pattern
      .exec(path)
      .slice(1)
      .forEach((value, i) => (context.params[names[i]] = value));
    const rendering = render(context);
    // Show what is available; statistics follow once they are computed.
    await Promise.race([rendering, firstChild(root)]);
    if (!signal.aborted) (replace(page, root), window.scrollTo(0, 0));
    await rendering;
  } catch (error) {
    if (!signal.aborted)
      replace(page, h("div.empty", {}, h("h2", {}, "This cannot be shown"), h("p", {}, error.message)));
  }
  if (!signal.aborted) document.body.classList.remove("loading");
}

// Resolves a permanent link (run name, example, repeat) to the page of a rollout.
async function linkPage(context) {
  const found = await ask("find", context.query);
  const hash = found.number === null ? `#/run/${found.run}` : `#/run/${found.run}/rollout/${found.number}`;
  replaceHash(hash);
  await show();
}

function firstChild(root) {
  return new Promise((resolve) => {
    const observer = new MutationObserver(() => (observer.disconnect(), resolve()));
    observer.observe(root, { childList: true });
  });
}

// Changes the URL without leaving the page; while the user types, without a history entry.
function updateHash(context, changes, { isTyping = false } = {}) {
  for (const [name, value] of Object.entries(changes)) {
    if (value === null || value === undefined) delete context.query[name];
    else context.query[name] = value;
  }
  const search = new URLSearchParams(context.query);
  const hash = `#/${context.path}${search.size ? `?${search}` : ""}`;
  if (hash === location.hash) return;
  if (isTyping) replaceHash(hash);
  else pushHash(hash);
}

// Inside a notebook frame, history cannot change the URL, so the fragment is set directly.
let isQuiet = false;

function pushHash(hash) {
  try {
    history.pushState(null, "", hash);
  } catch {
    isQuiet = true;
    location.hash = hash;
  }
}

function replaceHash(hash) {
  try {
    history.replaceState(null, "", hash);
  } catch {
    pushHash(hash);
  }
}

// Follow fragment links on this page itself, even inside the frame of another page.
function followLink(event) {
  const link = event.target instanceof Element ? event.target.closest("a[href^='#']") : null;
  if (!link || event.defaultPrevented || event.button || event.ctrlKey || event.metaKey || event.shiftKey) return;
  event.preventDefault();
  location.hash = link.getAttribute("href");
}

function drawCrumbs(parts) {
  const all = [["runs", "#/"], ...parts];
  replace(
    crumbs,
    all.map(([words, href], i) => [
      i ? h("span.separator", {}, "/") : null,
      href ? h("a", { href }, words) : h("span", {}, words),
    ]),
  );
  document.title = ["verifiers", ...parts.map(([words]) => visibleText(words))].join(" · ");
}

// --- light and dark -----------------------------------------------------------------------------------------------------

function isDark() {
  return document.documentElement.dataset.theme
    ? document.documentElement.dataset.theme === "dark"
    : matchMedia("(prefers-color-scheme: dark)").matches;
}

function toggleTheme() {
  document.documentElement.dataset.theme = isDark() ? "light" : "dark";
  try {
    localStorage.setItem("verifiers-theme", document.documentElement.dataset.theme);
  } catch {
    // A file opened from disk may have no storage; then the choice lasts for this visit.
  }
  drawThemeButton();
}

function recallTheme() {
  try {
    const theme = localStorage.getItem("verifiers-theme");
    if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
  } catch {
    // as above
  }
}

const themeButton = h("button.icon-button", {
  onclick: () => toggleTheme(),
  title: "light or dark (T)",
  "aria-label": "light or dark",
});

function drawThemeButton() {
  replace(themeButton, icon(isDark() ? "sun" : "moon"));
}

// --- start --------------------------------------------------------------------------------------------------------------

function start() {
  recallTheme();
  drawThemeButton();
  const logo = h("a.brand", { href: "#/" }, h("span.logo", {}, "✓"), "verifiers");
  const help = h(
    "button.icon-button",
    { onclick: () => toggleHelp(GENERAL_KEYS), title: "keys (?)", "aria-label": "keys" },
    "?",
  );
  replace(
    document.getElementById("app"),
    h(
      "header.top-bar",
      {},
      logo,
      crumbs,
      h("span.push"),
      isEmbedded() ? h("span.chip", {}, "exported file") : null,
      help,
      themeButton,
    ),
    page,
  );
  listen(GENERAL_KEYS);
  document.addEventListener("click", followLink);
  window.addEventListener("hashchange", () => (isQuiet ? (isQuiet = false) : show()));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawThemeButton);
  const first = embeddedData()?.first_page;
  if (first && !location.hash) replaceHash(first);
  show();
}

start();
