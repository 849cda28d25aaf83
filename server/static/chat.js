// The chat: what was said, the request for the next answer, and the answer as it comes.

import { Problem, events, problemOf, request } from "./api.js";
import { element, renderText } from "./text.js";

const $ = (id) => document.getElementById(id);
const ENDS = { stop: "", length: "cut off at the token limit" };

const messages = []; // as sent: { role, content }
let turns = []; // one element for each message, and for a failed answer
let running = null; // AbortController of the answer under way

export function startChat() {
  $("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    send();
  });
  $("prompt").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      send();
    }
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && !document.querySelector("dialog[open]")) stop();
  });
  $("stop").addEventListener("click", stop);
  $("retry").addEventListener("click", retry);
  $("clear").addEventListener("click", clear);
}

function send() {
  const text = $("prompt").value.trim();
  if (!text || running) return;
  $("prompt").value = "";
  if (messages.at(-1)?.role === "user") forget(messages.length - 1); // it got no answer
  add("user", "You", messages.length).text.textContent = text;
  messages.push({ role: "user", content: text });
  answer();
}

function stop() {
  running?.abort();
}

function retry() {
  if (running) return;
  const last = messages.findLastIndex((message) => message.role === "user");
  forget(last + 1);
  answer();
}

function clear() {
  stop();
  running = null;
  forget(0);
  $("prompt").focus();
  setBusy(false);
}

// Drop messages from `index` on, with what is shown of them.
function forget(index) {
  messages.length = Math.min(messages.length, index);
  turns = turns.filter((turn) => {
    if (turn.index < index) return true;
    turn.box.remove();
    return false;
  });
}

function add(role, name, index) {
  const text = element("div", { className: "text" });
  const notes = element("p", { className: "stats" });
  const box = element("article", { className: `turn ${role}` }, element("h2", { textContent: name }), text);
  if (role === "assistant") box.append(notes);
  const turn = { box, text, notes, index };
  turns.push(turn);
  $("log").append(box);
  follow(true);
  return turn;
}

// Keep the end in sight, unless the reader has scrolled back.
function follow(always) {
  const log = $("log");
  if (always || log.scrollHeight - log.scrollTop - log.clientHeight < 80) log.scrollTop = log.scrollHeight;
}

function setBusy(busy) {
  const focused = document.activeElement;
  $("send").hidden = busy;
  $("stop").hidden = !busy;
  $("retry").disabled = busy || messages.length === 0;
  $("clear").disabled = messages.length === 0;
  $("empty").hidden = messages.length > 0;
  $("log").setAttribute("aria-busy", String(busy)); // read out when complete
  if (focused?.hidden || focused?.disabled) $("prompt").focus(); // do not leave the keyboard nowhere
}

function body() {
  const system = $("system").value.trim();
  const wanted = {
    messages: [...(system ? [{ role: "system", content: system }] : []), ...messages],
    stream: true,
    stream_options: { include_usage: true, continuous_usage_stats: true },
  };
  if ($("model").value) wanted.model = $("model").value;
  for (const input of $("parameters").querySelectorAll("input")) {
    if (input.value !== "") wanted[input.name] = Number(input.value);
  }
  return JSON.stringify(wanted);
}

async function answer() {
  const controller = new AbortController();
  running = controller;
  const turn = add("assistant", $("model").selectedOptions[0]?.textContent ?? "Answer", messages.length);
  const state = { turn, content: "", reasoning: "", usage: null, finish: "", began: performance.now(), first: 0, last: 0 };
  setBusy(true);
  try {
    const options = { method: "POST", body: body(), signal: controller.signal, headers: { "Content-Type": "application/json" } };
    const response = await request("v1/chat/completions", options);
    for await (const data of events(response.body)) {
      if (data === "[DONE]") break;
      take(state, JSON.parse(data));
    }
    if (!state.finish) throw new Problem("The connection broke before the answer was complete.", "Retry asks again.");
  } catch (error) {
    if (error.name === "AbortError") state.finish = "stopped";
    else turn.box.append(problemBox(error));
  }
  draw(state);
  if (running !== controller) return; // a new chat has begun
  running = null;
  if (state.content) messages.push({ role: "assistant", content: state.content });
  setBusy(false);
}

function take(state, chunk) {
  if (chunk.error) throw problemOf(chunk.error);
  if (chunk.usage) state.usage = chunk.usage;
  const choice = chunk.choices[0];
  if (!choice) return;
  const { content, reasoning_content, reasoning } = choice.delta; // the name is the server's choice
  state.reasoning += reasoning_content ?? reasoning ?? "";
  state.content += content ?? "";
  if (choice.finish_reason) state.finish = choice.finish_reason;
  if (content || reasoning_content || reasoning) {
    state.last = performance.now();
    state.first ||= state.last;
    if (!state.frame) state.frame = requestAnimationFrame(() => draw(state));
  }
}

function draw(state) {
  cancelAnimationFrame(state.frame);
  state.frame = 0;
  const { turn } = state;
  if (state.reasoning) {
    if (!turn.thought) {
      turn.thought = element("div");
      turn.text.before(element("details", {}, element("summary", { textContent: "Reasoning" }), turn.thought));
    }
    turn.thought.textContent = state.reasoning.trim();
  }
  renderText(turn.text, state.content);
  turn.notes.textContent = stats(state);
  follow(false);
}

function stats({ usage, first, last, began, finish }) {
  const parts = [];
  const count = usage?.completion_tokens;
  if (count) parts.push(`${count} token${count > 1 ? "s" : ""}`);
  if (count > 1 && last > first) parts.push(`${(((count - 1) * 1000) / (last - first)).toFixed(1)} tokens/s`);
  if (first) parts.push(`first after ${((first - began) / 1000).toFixed(2)} s`);
  const end = ENDS[finish] ?? finish;
  if (end) parts.push(end);
  return parts.join(" · ");
}

function problemBox(error) {
  const known = error instanceof Problem;
  if (!known) console.error(error);
  const words = known ? error.message : "The page met an unexpected error.";
  return element("p", { className: "problem", role: "alert" }, `${words} ${error.advice ?? ""}`);
}
