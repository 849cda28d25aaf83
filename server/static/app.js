// The page as a whole: state of the server, models, views, colours, and the fields for key and address.

import { address, connection, getJson } from "./api.js";
import { startChat } from "./chat.js";
import { showLive, startLive } from "./live.js";
import { element } from "./text.js";

const $ = (id) => document.getElementById(id);
const POLL_MS = 5000;
const POLL_LOADING_MS = 1000;
const WORDS = { queue_full: "busy", draining: "draining", stalled: "stalled", dead: "engine has stopped" };

let timer = 0;
let modelsKnown = false;

async function poll() {
  clearTimeout(timer);
  let delay = POLL_MS;
  if (!document.hidden) {
    const ready = await readState();
    if (ready && !modelsKnown) await readModels();
    if (!ready || !modelsKnown) delay = POLL_LOADING_MS;
  }
  clearTimeout(timer);
  timer = setTimeout(poll, delay);
}

function show(kind, words, detail = "") {
  const state = $("state");
  state.className = kind;
  if (state.textContent !== words) state.textContent = words;
  state.title = detail;
}

// True if requests are served. Not through `request`: a 503 has the state in its body.
async function readState() {
  try {
    const response = await fetch(address("ready"), { cache: "no-store" });
    if (response.ok) {
      show("good", "ready");
      return true;
    }
    const { status, reason, phase, progress } = await response.json();
    const percent = progress ? ` ${Math.round(progress * 100)}%` : "";
    if (status === "loading") show("soon", phase === "serving" ? "starting" : phase + percent, reason);
    else show(status === "queue_full" ? "good" : "bad", WORDS[status] ?? status, reason);
    return status === "queue_full";
  } catch {
    show("bad", "no answer");
    return false;
  }
}

async function readModels() {
  const select = $("model");
  try {
    const { data } = await getJson("v1/models");
    select.replaceChildren(...data.map(({ id }) => element("option", { value: id, textContent: id.replace(/.*\//, "") })));
    select.disabled = data.length < 2;
    modelsKnown = true;
  } catch (problem) {
    show("bad", problem.status === 401 ? "needs an API key" : problem.message, problem.advice);
  }
}

function connect() {
  for (const name of ["key", "base"]) {
    $(name).value = connection[name];
    $(name).addEventListener("change", () => {
      connection[name] = $(name).value;
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
