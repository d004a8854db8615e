// Answers requests from the data in an exported file, as the server would.

let parsed;

export function embeddedData() {
  if (parsed === undefined) {
    const element = document.getElementById("embedded");
    parsed = element ? JSON.parse(element.textContent) : null;
  }
  return parsed;
}

export function answerEmbedded(path, query) {
  const data = embeddedData();
  const [kind, first, second, third] = path.split("/");
  if (kind === "find") return foundByName(data, query);
  if (kind === "compare" && !first) return comparedTable(data, query);
  if (kind === "compare")
    return third ? comparedExample(data, first, second, query) : compared(data, first, second, query);
  if (!first) return { runs: data.runs, roots: [] };
  const about = data.runs.find((run) => run.id === first);
  if (!about) throw new Error("this run is not in the file");
  const rollouts = data.rollouts[first];
  if (!second) return about;
  if (second === "figures") return data.figures[first];
  if (second === "training") return data.training[first];
  if (second === "shares") return data.shares[first];
  if (second === "group") return groupOf(rollouts, JSON.parse(query.example));
  if (third === undefined) return embeddedPage(rollouts, about, query);
  if (!rollouts[Number(third)]) throw new Error("this rollout is not in the file");
  const order = orderOf(rollouts, query).map((rollout) => rollout.number);
  const place = order.indexOf(Number(third));
  return {
    rollout: rollouts[Number(third)],
    around: {
      previous: place > 0 ? order[place - 1] : null,
      next: place >= 0 && place + 1 < order.length ? order[place + 1] : null,
      place: place < 0 ? null : place,
      total: order.length,
    },
    group: groupOf(rollouts, rollouts[Number(third)].example_id).rollouts.map((rollout) => rollout.number),
  };
}

function embeddedPage(rollouts, about, query) {
  const order = orderOf(rollouts, query);
  const start = Number(query.start ?? 0);
  const rows = order.slice(start, start + Number(query.n ?? 50));
  return {
    total: order.length,
    of: rollouts.length,
    start,
    is_done: true,
    share_read: 1,
    version: about.version,
    rows,
  };
}

function orderOf(rollouts, query) {
  const found = rollouts.filter((rollout) => matches(rollout, query));
  const sort = query.sort ?? "number";
  const sign = query.desc === "1" ? -1 : 1;
  if (sort === "number") return sign < 0 ? found.reverse() : found;
  const value = (rollout) => sortValue(rollout, sort);
  const isMissing = (rollout) => value(rollout) === null || value(rollout) === undefined;
  const known = found.filter((rollout) => !isMissing(rollout));
  known.sort((a, b) => sign * (value(a) < value(b) ? -1 : value(a) > value(b) ? 1 : 0));
  return [...known, ...found.filter(isMissing)];
}

function sortValue(rollout, sort) {
  if (sort.startsWith("metric:")) return rollout.metrics[sort.slice(7)];
  return { example: rollout.example_id, time: rollout.time_ms }[sort] ?? rollout[sort];
}

function matches(rollout, query) {
  if (query.status === "scored" ? rollout.reward === null : query.status && rollout.status !== query.status)
    return false;
  for (const name of ["task", "stop", "cause"])
    if (query[name] !== undefined && rollout[name] !== query[name]) return false;
  if (query.step !== undefined && rollout.step !== Number(query.step)) return false;
  if (query.low !== undefined && !(rollout.reward !== null && rollout.reward >= Number(query.low) - 1e-8)) return false;
  if (query.high !== undefined && !(rollout.reward !== null && rollout.reward <= Number(query.high) + 1e-8))
    return false;
  if (query.truncated === "1" && !rollout.is_truncated) return false;
  return !query.q || holds(rollout, query.q.toLowerCase());
}

function holds(value, needle) {
  if (typeof value === "string") return value.toLowerCase().includes(needle);
  if (typeof value === "number") return String(value).includes(needle);
  if (Array.isArray(value)) return typeof value[0] !== "number" && value.some((item) => holds(item, needle));
  return value !== null && typeof value === "object" && Object.values(value).some((item) => holds(item, needle));
}

function groupOf(rollouts, example) {
  const found = rollouts.filter((rollout) => rollout.example_id === example).sort((a, b) => a.rollout - b.rollout);
  return { example_id: example, total: found.length, rollouts: found };
}

function compared(data, a, b, query) {
  const found = data.comparisons[`${a}/${b}/${query.metric ?? "reward"}`];
  if (!found) throw new Error("these two runs are not compared in this file");
  const rows = found.rows.filter((row) => !query.verdict || row.verdict === query.verdict);
  const start = Number(query.start ?? 0);
  const run = (id) => data.runs.find((about) => about.id === id);
  return { ...found, a: run(a), b: run(b), total: rows.length, rows: rows.slice(start, start + Number(query.n ?? 50)) };
}

function comparedTable(data, query) {
  const [first, ...others] = query.runs.split(",");
  const ids = [first, ...others.sort()];
  const found = data.tables[`${ids.join(",")}/${query.metric ?? "reward"}`];
  if (!found) throw new Error("these runs are not compared in this file");
  return { ...found, runs: ids.map((id) => data.runs.find((about) => about.id === id)) };
}

function foundByName(data, query) {
  const run = data.runs.find((about) => about.name === query.run && (!query.env || about.env_id === query.env));
  if (!run) throw new Error("this run is not in the file");
  if (query.example === undefined) return { run: run.id, number: null };
  const [example, repeat] = [JSON.parse(query.example), Number(query.rollout ?? 0)];
  const rollout = data.rollouts[run.id].find((one) => one.example_id === example && one.rollout === repeat);
  if (!rollout) throw new Error("this rollout is not in the file");
  return { run: run.id, number: rollout.number };
}

function comparedExample(data, a, b, query) {
  const example = JSON.parse(query.example);
  const side = (id) => groupOf(data.rollouts[id], example).rollouts;
  return { example_id: example, a: side(a), b: side(b) };
}
