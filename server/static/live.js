// The live view: asks once a second, and only while somebody looks.

import { getJson, request } from "./api.js";
import { colorOf, drawBlocks, drawLanes, words } from "./charts.js";
import { element } from "./text.js";

const $ = (id) => document.getElementById(id);
const POLL_MS = 1000;
const PLACES = 120; // steps, and seconds, that charts show
const COUNTERS = {
  generated: "vllm:generation_tokens_total",
  prompt: "vllm:prompt_tokens_total",
  firstSum: "vllm:time_to_first_token_seconds_sum",
  firstCount: "vllm:time_to_first_token_seconds_count",
  gapSum: "vllm:inter_token_latency_seconds_sum",
  gapCount: "vllm:inter_token_latency_seconds_count",
};

let shown = false;
let timer = 0;
let polling = false;
let before = null; // counters of the last poll, with their time
let timelineId = 0;
const history = { generated: [], prompt: [], first: [], gap: [] };
const rows = new Map(); // by request

export function startLive() {
  document.addEventListener("visibilitychange", poll);
}

export function showLive(show) {
  shown = show;
  before = null;
  poll();
}

async function poll() {
  clearTimeout(timer);
  if (!shown || document.hidden || polling) return;
  polling = true;
  const began = performance.now();
  try {
    await Promise.all([readMetrics(), readRequests(), readBlocks(), readSteps()]);
    $("live-problem").hidden = true;
  } catch (error) {
    $("live-problem").hidden = false;
    $("live-problem").textContent = `${error.message} ${error.advice ?? ""}`;
  }
  polling = false;
  timer = setTimeout(poll, Math.max(100, POLL_MS - (performance.now() - began)));
}

async function readMetrics() {
  const text = await (await request("metrics")).text();
  const now = { at: performance.now() };
  for (const [key, name] of Object.entries(COUNTERS)) {
    const line = text.split("\n").find((candidate) => candidate.startsWith(name + "{"));
    now[key] = Number(line?.split(" ").at(-1) ?? 0);
  }
  if (before) {
    const change = (key) => now[key] - before[key];
    const seconds = (now.at - before.at) / 1000;
    push("generated", change("generated") / seconds);
    push("prompt", change("prompt") / seconds);
    push("first", (change("firstSum") / change("firstCount")) * 1000); // no number if nothing came
    push("gap", (change("gapSum") / change("gapCount")) * 1000);
  }
  before = now;
  drawLanes($("rates"), [
    { name: "Tokens generated", unit: "/s", values: history.generated, color: colorOf("c-used") },
    { name: "Prompt tokens", unit: "/s", values: history.prompt, color: colorOf("c-shared") },
    { name: "Time to first token", unit: " ms", values: history.first, color: colorOf("c-shared"), bars: true },
    { name: "Time between tokens", unit: " ms", values: history.gap, color: colorOf("c-used") },
  ], PLACES);
}

function push(key, value) {
  history[key].push(value);
  if (history[key].length > PLACES) history[key].shift();
}

async function readSteps() {
  const { steps } = await getJson(`debug/steps?last=${PLACES}`);
  const lane = (name, key, color) => ({ name, unit: "", values: steps.map((step) => step[key]), color, bars: true });
  drawLanes($("steps"), [
    lane("Prompt tokens in a step", "prefill_tokens", colorOf("c-shared")),
    lane("Requests that decode", "decode_tokens", colorOf("c-used")),
    lane("Requests that wait", "waiting", colorOf("c-cached")),
    lane("Free blocks", "free_blocks", colorOf("c-cached")),
  ], PLACES);
}

async function readBlocks() {
  const { totals, runs, num_blocks, block_size, host } = await getJson("debug/kv");
  const used = totals.used + totals.shared;
  const said = `${used} of ${num_blocks} used (${words((used / num_blocks) * 100)}%), ${totals.cached} cached, ` +
    `${totals.shared} shared · ${block_size} tokens each`;
  $("kv-totals").textContent = said;
  $("map").setAttribute("aria-label", `Map of KV blocks: ${said}`);
  drawBlocks($("map"), runs);
  $("host").hidden = !host;
  if (host) {
    $("host").textContent = `Host memory: ${host.num_used} of ${host.num_slots} blocks, ` +
      `${host.num_saved} copied out and ${host.num_loaded} back since the start.`;
  }
}

async function readRequests() {
  const { running, waiting, encoding, requests } = await getJson("debug/requests?last=200");
  $("counts").textContent = `${running} running, ${waiting + encoding} waiting`;
  $("no-requests").hidden = requests.length > 0;
  const alive = new Set(requests.map(({ id }) => id));
  for (const [id, row] of rows) {
    if (!alive.has(id)) {
      row.remove();
      rows.delete(id);
    }
  }
  requests.forEach((one, place) => {
    if (!rows.has(one.id)) rows.set(one.id, newRow(one));
    const row = rows.get(one.id);
    if ($("requests").children[place] !== row) $("requests").insertBefore(row, $("requests").children[place] ?? null);
    fill(row, one);
  });
}

function newRow({ id, request_id }) {
  const open = element("button", { textContent: id, title: `What happened to ${request_id ?? id}`, className: "link" });
  open.addEventListener("click", () => showTimeline(id));
  return element("tr", {}, element("th", { scope: "row" }, open), ...Array.from({ length: 8 }, () => element("td")));
}

function stateOf({ state, phase, computed_tokens, prompt_tokens, output_tokens }) {
  if (phase === "queued") return state;
  const share = phase === "prefill" ? ` ${computed_tokens} of ${prompt_tokens + output_tokens}` : "";
  return `${state}, ${phase}${share}`;
}

function fill(row, one) {
  row.className = one.state;
  const values = [
    stateOf(one),
    one.reason,
    one.prompt_tokens ?? "",
    one.output_tokens ?? "",
    one.blocks ?? "",
    one.row || "",
    one.priority ?? "",
    `${one.age_s.toFixed(1)} s`,
  ];
  values.forEach((value, index) => {
    const cell = row.children[index + 1];
    if (cell.textContent !== String(value)) cell.textContent = value;
  });
}

async function showTimeline(id) {
  timelineId = id;
  const list = $("timeline").querySelector("ol");
  list.replaceChildren();
  $("timeline-title").textContent = `Request ${id}`;
  $("timeline").showModal();
  let lines = [];
  try {
    const { timelines } = await getJson(`debug/requests/${id}/timeline`);
    const { events } = timelines[0];
    lines = events.map(({ time, text }) => element("li", {}, element("span", { textContent: `+${(time - events[0].time).toFixed(3)} s` }), text));
  } catch (error) {
    lines = [element("li", { textContent: error.message })];
  }
  if (timelineId === id) list.replaceChildren(...lines);
}
