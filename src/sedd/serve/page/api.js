// The HTTP interface of the server. Errors become `Problem`s: a sentence, and what to do.

const KEY = "sedd-api-key";

export class Problem extends Error {
  constructor(message, { status = 0, field = null, retryAfter = null } = {}) {
    super(message);
    Object.assign(this, { status, field, retryAfter });
  }
}

export function setKey(key) {
  sessionStorage.setItem(KEY, key);
}

function headers() {
  const key = sessionStorage.getItem(KEY);
  return { "content-type": "application/json", ...(key ? { authorization: `Bearer ${key}` } : {}) };
}

async function send(path, body, signal) {
  let response;
  try {
    const options = body === undefined ? {} : { method: "POST", body: JSON.stringify(body) };
    response = await fetch(path, { ...options, headers: headers(), signal });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Problem("The server does not answer. Check that sedd serve is still running, then try again.");
  }
  if (!response.ok) throw await problemOf(response);
  return response;
}

async function problemOf(response) {
  const { status } = response;
  let error = {};
  try {
    error = (await response.json()).error ?? {};
  } catch {
    // not JSON: the status must do
  }
  const retryAfter = Number(response.headers.get("retry-after")) || null;
  const message = sentence(error.message ?? `the server answered ${status} ${response.statusText}`);
  return new Problem(message, { status, field: error.param ?? null, retryAfter });
}

export function sentence(text) {
  const start = text.charAt(0).toUpperCase() + text.slice(1);
  return /[.!?]$/.test(start) ? start : `${start}.`;
}

export async function models(signal) {
  return (await (await send("v1/models", undefined, signal)).json()).data;
}

const counts = new Map();

export async function countTokens(text, signal) {
  if (!text) return 0;
  if (!counts.has(text)) {
    const { tokens } = await (await send("v1/tokenize", { text }, signal)).json();
    if (counts.size > 2000) counts.clear();
    counts.set(text, tokens.length);
  }
  return counts.get(text);
}

// Yield [event, data] of a text that is being filled.
export async function* infill(body, signal) {
  const response = await send("v1/infill", { ...body, diffusing: true, details: true }, signal);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      buffer += value.replaceAll("\r", "");
      const blocks = buffer.split("\n\n");
      buffer = blocks.pop();
      for (const block of blocks) {
        const event = parseEvent(block);
        if (event) yield event;
      }
    }
  } catch (error) {
    if (error.name === "AbortError" || error instanceof Problem) throw error;
    throw new Problem("The connection broke before the text was complete. Run again to repeat it with the same seed.");
  } finally {
    reader.cancel().catch(() => {});
  }
}

function parseEvent(block) {
  let [name, data] = ["message", ""];
  for (const line of block.split("\n")) {
    if (line.startsWith("event:")) name = line.slice(6).trim();
    else if (line.startsWith("data:")) data += line.slice(5).replace(/^ /, "");
  }
  return data ? [name, JSON.parse(data)] : null;
}
