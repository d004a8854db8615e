// The address → a page, with what all pages share: the bar at the top, light and dark, keys.

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
    // What a page that was left meanwhile has to say comes too late.
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
    // What is there is shown at once; figures come when they are counted.
    await Promise.race([rendering, firstChild(root)]);
    if (!signal.aborted) (replace(page, root), window.scrollTo(0, 0));
    await rendering;
  } catch (error) {
    if (!signal.aborted)
      replace(page, h("div.empty", {}, h("h2", {}, "This cannot be shown"), h("p", {}, error.message)));
  }
  if (!signal.aborted) document.body.classList.remove("loading");
}

// A link that names a rollout by what it is → the page of it, wherever its run lies here.
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

// Changes the address without leaving the page; while one types, without a step to go back to.
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

// Inside a notebook the page has no address of its own that history could change: it has a fragment.
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

// A link to a fragment belongs to this page, also where the page is part of another one.
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
    // A file opened from disk may have no storage: then it is for this visit.
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
