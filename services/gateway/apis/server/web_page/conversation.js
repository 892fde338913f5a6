// The conversation: what is sent to the server, and how its answers are read.
"use strict";

const STATS_INTERVAL_MS = 1000;
const SLOW_STATS_INTERVAL_MS = 4000; // while the server does not answer
const STATS_TIMEOUT_MS = 5000;
const FINISH_NOTES = { length: "cut at the token limit", abort: "aborted by the server", stopped: "stopped" };
const MAX_INDENT = 40; // levels; a model may nest without end
const TOOLS_EXAMPLE = [{
  type: "function",
  function: {
    name: "get_weather",
    description: "The weather of a city",
    parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
  },
}];

const element = (id) => document.getElementById(id);
const turns = []; // { question, pictures, reply, results: messages with what its calls returned, or null, view }, oldest first
let current = null; // AbortController of the answer that streams

// ---- the conversation ------------------------------------------------------------------------------------

// The answer of a turn.
class Reply {
  constructor() { this.content = ""; this.reasoning = ""; this.calls = []; }
  get text() { return this.reasoning + this.content + this.calls.map((call) => call.name + call.arguments).join(""); }
}

// Calls without results are left out, as are questions without an answer. A turn that answers calls has no question:
// their results are those of the turn before.
function messages(turn) {
  const system = element("system").value.trim();
  const list = system ? [{ role: "system", content: system }] : [];
  for (const each of turns) {
    const { question, reply, results } = each;
    if (each !== turn && !reply.content && !results) continue;
    if (question !== null) list.push({ role: "user", content: contentOf(each) });
    if (each === turn) break;
    const message = { role: "assistant", content: reply.content };
    if (reply.reasoning) message.reasoning_content = reply.reasoning;
    if (results) {
      message.tool_calls = reply.calls.map((call) => (
        { id: call.id, type: "function", function: { name: call.name, arguments: call.arguments } }));
    }
    list.push(message, ...results ?? []);
  }
  return list;
}

function sampling() {
  const options = {};
  for (const input of element("sampling").querySelectorAll("input[type=number]")) {
    if (!input.checkValidity()) throw new Problem(`${labelOf(input)}: ${input.validationMessage}`, input);
    if (input.value !== "") options[input.id] = input.valueAsNumber;
  }
  const stop = element("stop-strings").value.split("\n").filter(Boolean);
  if (stop.length) options.stop = stop;
  if (element("tools").value.trim()) options.tools = jsonOf(element("tools"));
  const format = element("response-format").value;
  if (format === "json_object") options.response_format = { type: format };
  if (format === "json_schema") {
    options.response_format = { type: format, json_schema: { name: "answer", schema: jsonOf(element("schema")), strict: true } };
  }
  return options;
}

function jsonOf(input) {
  try {
    return JSON.parse(input.value);
  } catch (error) {
    throw new Problem(`${labelOf(input)}: not JSON: ${error.message}`, input);
  }
}

async function answer(turn) {
  const { view } = turn;
  let body;
  let isJson;
  try {
    const options = sampling();
    isJson = options.response_format !== undefined;
    body = JSON.stringify({ messages: messages(turn), stream: true, stream_options: { include_usage: true }, ...options });
  } catch (error) {
    if (!(error instanceof Problem)) throw error;
    showProblem(view, error);
    return;
  }
  const reply = turn.reply = new Reply();
  beginView(view, isJson);
  const timer = new Timer();
  current = new AbortController();
  setBusy(true);
  let usage = null;
  let finish = null;
  try {
    const response = await post("/v1/chat/completions", body, current.signal);
    for await (const event of serverSentEvents(response.body)) {
      if (event === "[DONE]") break;
      const chunk = JSON.parse(event);
      if (chunk.error) throw new Problem(readable(chunk.error));
      usage = chunk.usage ?? usage;
      const choice = chunk.choices?.[0];
      finish = choice?.finish_reason ?? finish;
      if (choice?.delta) keepingBottom(() => { if (addDelta(reply, view, choice.delta)) timer.mark(); });
    }
    if (finish === null) throw new Problem("The connection ended before the answer did.");
  } catch (error) {
    if (error.name === "AbortError") finish = "stopped";
    else if (error instanceof Problem) showProblem(view, error);
    else showProblem(view, new Problem(reply.text ? "The connection to the server broke." : "The server cannot be reached."));
  } finally {
    current = null;
    setBusy(false);
  }
  const numTokens = usage?.completion_tokens ?? await countTokens(reply.text);
  endView(turn, isJson, timer, numTokens, usage !== null, finish);
}

// Adds a piece to the answer and to its view. Returns whether the piece had anything in it.
function addDelta(reply, view, delta) {
  const reasoning = delta.reasoning_content ?? delta.reasoning;
  const calls = delta.tool_calls ?? [];
  if (reasoning) {
    reply.reasoning += reasoning;
    grow(view.querySelector(".thoughts"), reasoning);
    view.querySelector(".reasoning").hidden = false;
  }
  if (delta.content) {
    reply.content += delta.content;
    grow(view.querySelector(".answer .text"), delta.content);
  }
  for (const piece of calls) {
    let call = reply.calls.find((each) => each.index === piece.index);
    if (!call) {
      call = { index: piece.index, id: piece.id, name: piece.function.name, arguments: "", view: addCall(view, piece.function.name) };
      reply.calls.push(call);
    }
    call.arguments += piece.function.arguments ?? "";
    grow(call.view, piece.function.arguments ?? "");
  }
  return Boolean(reasoning || delta.content || calls.length);
}

class Timer {
  constructor() { this.start = performance.now(); this.first = null; this.last = null; }
  mark() { this.last = performance.now(); this.first ??= this.last; }
  get ttftMs() { return this.first === null ? null : this.first - this.start; }
  tokensPerSecond(numTokens) {
    if (this.first === null || !numTokens) return null;
    const isSpread = numTokens > 1 && this.last > this.first;
    return isSpread ? 1000 * (numTokens - 1) / (this.last - this.first) : 1000 * numTokens / (this.last - this.start);
  }
}

// An answer that was cut short has no usage; its text tells nearly the same.
async function countTokens(text) {
  if (!text) return null;
  try {
    const response = await post("/tokenize", JSON.stringify({ prompt: text }));
    return (await response.json()).count ?? null;
  } catch {
    return null; // the figure is left out
  }
}

// ---- talking to the server -------------------------------------------------------------------------------

class Problem extends Error {
  constructor(message, field = null) { super(message); this.field = field; }
}

function headers() {
  const key = element("api-key").value.trim();
  return key ? { Authorization: `Bearer ${key}` } : {};
}

async function post(path, body, signal = AbortSignal.timeout(STATS_TIMEOUT_MS)) {
  const response = await fetch(path, { method: "POST", headers: { "Content-Type": "application/json", ...headers() }, body, signal });
  if (!response.ok) throw await problemOf(response);
  return response;
}

async function problemOf(response) {
  let message = `The server answered ${response.status} ${response.statusText}`.trim() + ".";
  try {
    const error = (await response.json()).error;
    if (error) message = readable(error);
  } catch { /* no JSON: the status has to do */ }
  const retryAfter = response.headers.get("Retry-After");
  if (retryAfter) message += ` Try again in ${retryAfter} s.`;
  if (response.status !== 401) return new Problem(message);
  return new Problem(`${message} Enter one under Options.`, element("api-key"));
}

function readable(error) {
  const message = typeof error === "string" ? error : error.message ?? JSON.stringify(error);
  return message.charAt(0).toUpperCase() + message.slice(1) + (/[.!?]$/.test(message) ? "" : ".");
}

async function* serverSentEvents(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  while (true) {
    const { done, value } = await reader.read();
    if (done) return;
    buffer += value;
    const events = buffer.split(/\r?\n\r?\n/);
    buffer = events.pop();
    for (const event of events) {
      const data = event.split(/\r?\n/).filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trimStart());
      if (data.length) yield data.join("\n");
    }
  }
}
