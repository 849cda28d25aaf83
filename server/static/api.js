// Requests to the server: its address, the key, refusals as advice, and the reader of event streams.

export const connection = {
  get key() { return sessionStorage.getItem("key") ?? ""; },
  set key(value) { sessionStorage.setItem("key", value.trim()); },
  get base() { return sessionStorage.getItem("base") ?? ""; },
  set base(value) {
    const plain = value.trim().replace(/\/+(v1\/*)?$/, "");
    sessionStorage.setItem("base", plain && !plain.includes("://") ? `http://${plain}` : plain);
  },
};

// Relative to the page, so that a proxy may serve it below any path.
export function address(path) {
  return new URL(path, connection.base ? connection.base + "/" : location.href.split(/[?#]/)[0]);
}

export class Problem extends Error {
  constructor(message, advice = "", status = 0) {
    super(message);
    this.advice = advice;
    this.status = status;
  }
}

const ADVICE = {
  invalid_api_key: "Put a valid key into the field API key of the settings.",
  forbidden: "Put the operators' key (--admin-key) into the field API key of the settings.",
  not_ready: "The state at the top tells how far the start is; try again when it says ready.",
  draining: "The server is about to stop. Try again when it is back.",
  engine_dead: "The server's log says why. It has to be started again.",
  context_length_exceeded: "Begin a new chat, or lower max tokens.",
  exceeds_kv_capacity: "Begin a new chat, or lower max tokens.",
  internal_error: "Retry asks again. If it fails again, the server's log says more under this id.",
  model_not_found: "Choose one of the models at the top.",
};

export function problemOf(error, status = 0, retryAfter = null) {
  const wait = retryAfter ? `Try again in ${retryAfter} s.` : "";
  return new Problem(error.message ?? "The server gave no reason.", ADVICE[error.code] ?? wait, status);
}

async function refusal(response) {
  const retryAfter = response.headers.get("Retry-After");
  try {
    return problemOf((await response.json()).error, response.status, retryAfter);
  } catch {
    const advice = "That is no answer of Sluice: look at the address and at the proxy in between.";
    return new Problem(`${address("")} answered ${response.status}.`, advice, response.status);
  }
}

function unreachable() {
  const advice = connection.base
    ? `Is it running, and started with --allowed-origins ${location.origin}?`
    : "Is the server running?";
  return new Problem(`No answer from ${address("")}`, advice);
}

// Throws a Problem, or an AbortError if `options.signal` says stop.
export async function request(path, options = {}) {
  const headers = { ...options.headers };
  if (connection.key) headers.Authorization = `Bearer ${connection.key}`;
  let response;
  try {
    response = await fetch(address(path), { ...options, headers, cache: "no-store" });
  } catch (error) {
    throw error.name === "AbortError" ? error : unreachable();
  }
  if (!response.ok) throw await refusal(response);
  return response;
}

export async function getJson(path) {
  return (await request(path)).json();
}

// The `data:` of each server-sent event. Comments, such as keep-alive, are skipped.
export async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines) {
        if (line.startsWith("data:")) yield line.slice(5).trim();
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
