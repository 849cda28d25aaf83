// The page as a whole: state of the server, models, views, colours, and the fields for key and address.

import { address, connection, getJson } from "./api.js";
import { startChat } from "./chat.js";
import { showLive, startLive } from "./live.js";
import { element } from "./text.js";

const $ = (id) => document.getElementById(id);
const POLL_MS = 5000;
const POLL_SOON_MS = 1000;
const WORDS = { draining: "draining", stalled: "stalled", dead: "the engine has stopped" };
const GONE = { kind: "bad", words: "no answer" };

let timer = 0;
let modelsKnown = false;

async function poll() {
  clearTimeout(timer);
  let delay = POLL_MS;
  if (!document.hidden) {
    let state = await readState();
    if (state !== GONE && !modelsKnown) state = (await readModels()) ?? state;
    show(state);
    if (state === GONE || state.kind === "soon") delay = POLL_SOON_MS;
  }
  clearTimeout(timer);
  timer = setTimeout(poll, delay);
}

function show({ kind, words, detail = "" }) {
  const state = $("state");
  state.className = kind;
  if (state.textContent !== words) state.textContent = words; // said aloud only when it changes
  state.title = detail;
}

// Not through `request`: a 503 has the state in its body.
async function readState() {
  let status, reason, phase, progress;
  try {
    const response = await fetch(address("ready"), { cache: "no-store" });
    ({ status, reason, phase, progress } = await response.json());
  } catch {
    return GONE;
  }
  if (status === "ok") return { kind: "good", words: "ready" };
  if (status === "queue_full") return { kind: "soon", words: "busy: the queue is full", detail: reason };
  if (status !== "loading") return { kind: "bad", words: WORDS[status] ?? status, detail: reason };
  const percent = progress ? ` ${Math.round(progress * 100)}%` : "";
  return { kind: "soon", words: phase === "serving" ? "starting" : phase + percent, detail: reason };
}

// What to show instead of the state if the names are refused.
async function readModels() {
  const select = $("model");
  try {
    const { data } = await getJson("v1/models");
    select.replaceChildren(...data.map(({ id }) => element("option", { value: id, textContent: id.replace(/.*\//, "") })));
    select.disabled = data.length < 2;
    modelsKnown = true;
    return null;
  } catch (problem) {
    const words = problem.status === 401 ? "needs an API key" : problem.message;
    return { kind: "bad", words, detail: problem.advice };
  }
}

function connect() {
  for (const name of ["key", "base"]) {
    $(name).value = connection[name];
    $(name).addEventListener("change", () => {
      connection[name] = $(name).value;
      $(name).value = connection[name];
      modelsKnown = false;
      poll();
    });
  }
}

function showView() {
  const live = location.hash === "#live";
  $("chat-view").hidden = live;
  $("live-view").hidden = !live;
  $("to-chat").ariaCurrent = live ? null : "page";
  $("to-live").ariaCurrent = live ? "page" : null;
  showLive(live);
}

function startTheme() {
  const stored = localStorage.getItem("theme");
  const system = matchMedia("(prefers-color-scheme: dark)");
  const apply = (dark, chosen) => {
    if (chosen) document.documentElement.dataset.theme = dark ? "dark" : "light";
    $("theme").setAttribute("aria-pressed", String(dark));
  };
  apply(stored ? stored === "dark" : system.matches, Boolean(stored));
  system.addEventListener("change", () => localStorage.getItem("theme") || apply(system.matches, false));
  $("theme").addEventListener("click", () => {
    const dark = $("theme").getAttribute("aria-pressed") !== "true";
    localStorage.setItem("theme", dark ? "dark" : "light");
    apply(dark, true);
  });
}

startTheme();
connect();
startChat();
startLive();
if (matchMedia("(max-width: 60rem)").matches) $("settings").open = false;
addEventListener("hashchange", showView);
document.addEventListener("visibilitychange", poll);
showView();
poll();
