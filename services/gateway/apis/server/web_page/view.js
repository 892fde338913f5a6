// The view: the turns of the conversation, the load of the server, and the events of controls.

// ---- what is shown ---------------------------------------------------------------------------------------

function addTurn(question, shown = question, pictures = []) {
  const view = element("turn").content.cloneNode(true).firstElementChild;
  const turn = { question, pictures, reply: new Reply(), results: null, view };
  view.querySelector(".question").textContent = shown;
  view.querySelector(".question").hidden = !shown;
  view.querySelector(".pictures").replaceChildren(...pictures.map((url, i) => imageOf(url, `Picture ${i + 1}`)));
  view.querySelector(".pictures").hidden = !pictures.length;
  view.querySelector(".copy").addEventListener("click", (event) => copy(event.currentTarget, turn.reply.content));
  view.querySelector(".again").addEventListener("click", () => { if (!current) answer(turn); });
  view.querySelector(".results").addEventListener("submit", (event) => { event.preventDefault(); sendResults(turn); });
  turns.push(turn);
  element("welcome").hidden = true;
  element("turns").append(view);
  for (const each of turns) {
    each.view.querySelector(".again").hidden = each !== turn;
    each.view.querySelector(".results").hidden = true;
  }
  return turn;
}

function beginView(view, isJson) {
  view.querySelector(".answer").hidden = false;
  for (const part of [".thoughts", ".answer .text", ".calls"]) view.querySelector(part).replaceChildren();
  view.querySelector(".answer .text").classList.toggle("is-json", isJson);
  for (const part of [".reasoning", ".results", ".problem", ".figures", ".actions"]) view.querySelector(part).hidden = true;
  view.classList.add("is-streaming");
  view.scrollIntoView({ block: "end" });
}

// Adds text to an element that has nothing else.
function grow(view, text) {
  if (view.firstChild) view.firstChild.appendData(text);
  else view.textContent = text;
}

// Adds a call to the view of an answer. Returns the element for its arguments.
function addCall(view, name) {
  const call = element("call").content.cloneNode(true).firstElementChild;
  call.querySelector("code").textContent = name;
  view.querySelector(".calls").append(call);
  return call.querySelector("pre");
}

// Asks for the results of an answer's calls.
function askForResults(turn) {
  const form = turn.view.querySelector(".results");
  form.querySelectorAll(".field").forEach((field) => field.remove());
  for (const call of turn.reply.calls) {
    const field = element("result").content.cloneNode(true).firstElementChild;
    field.querySelector("span").textContent = `Result of ${call.name}`;
    form.lastElementChild.before(field);
  }
  form.hidden = false;
}

function sendResults(turn) {
  if (current) return;
  const contents = [...turn.view.querySelectorAll(".results textarea")].map((field) => field.value);
  turn.results = turn.reply.calls.map((call, i) => ({ role: "tool", tool_call_id: call.id, content: contents[i] }));
  const shown = turn.reply.calls.map((call, i) => `Result of ${call.name}: ${contents[i]}`);
  element("prompt").focus();
  answer(addTurn(null, shown.join("\n")));
}

// The text with one value a line if it is JSON, else null. Only white space changes: JSON.stringify would also round
// numbers, sort keys that are numbers, and drop repeated keys.
function formattedJson(text) {
  try {
    JSON.parse(text);
  } catch {
    return null;
  }
  let depth = 0;
  let previous = "";
  let result = "";
  const newLine = () => "\n" + "  ".repeat(Math.min(depth, MAX_INDENT));
  for (const [token] of text.matchAll(/"[^"\\]*(?:\\.[^"\\]*)*"|[[\]{},:]|[^\s[\]{},:"]+/g)) {
    const isFirst = previous === "[" || previous === "{";
    const isEnd = token === "]" || token === "}";
    if (isEnd) depth -= 1;
    if (isEnd ? !isFirst : isFirst || previous === ",") result += newLine();
    result += token === ":" ? ": " : token;
    if (token === "[" || token === "{") depth += 1;
    previous = token;
  }
  return result;
}

function showJson(view, text) {
  const formatted = formattedJson(text);
  if (formatted !== null) view.textContent = formatted;
  return formatted !== null;
}

function endView(turn, isJson, timer, numTokens, isExact, finish) {
  const { reply, view } = turn;
  const hasCalls = finish === "tool_calls" && reply.calls.length > 0;
  const figures = {
    ttft: timer.ttftMs === null ? "" : duration(timer.ttftMs),
    speed: rate(timer.tokensPerSecond(numTokens)),
    tokens: numTokens === null ? "" : (isExact ? "" : "≈ ") + numTokens.toLocaleString("en"),
    finish: FINISH_NOTES[finish] ?? "",
  };
  keepingBottom(() => {
    view.classList.remove("is-streaming");
    view.querySelector(".answer").hidden = !reply.text;
    const text = view.querySelector(".answer .text");
    if (isJson || /^\s*[[{]/.test(reply.content)) text.classList.toggle("is-json", showJson(text, reply.content) || isJson);
    for (const call of reply.calls) showJson(call.view, call.arguments);
    if (hasCalls) askForResults(turn);
    for (const [name, value] of Object.entries(figures)) {
      const row = view.querySelector(`.figures .${name}`);
      row.hidden = !value;
      row.querySelector("dd").textContent = value;
    }
    view.querySelector(".figures").hidden = false;
    view.querySelector(".actions").hidden = false;
    view.querySelector(".copy").hidden = !reply.content;
  });
  element("announce").textContent = finish === null ? "" : `Answer ${finish === "stopped" ? "stopped" : "complete"}, ${figures.tokens} tokens.${hasCalls ? " Its calls wait for their results." : ""}`;
}

function showProblem(view, problem) {
  keepingBottom(() => {
    view.querySelector(".problem").textContent = problem.message;
    view.querySelector(".problem").hidden = false;
    view.querySelector(".actions").hidden = false;
    view.querySelector(".copy").hidden = true;
  });
  if (problem.field) {
    showOptions(true);
    problem.field.closest("details")?.setAttribute("open", "");
    problem.field.focus();
  }
}

// Follows the text as it grows, unless the reader has scrolled up.
function keepingBottom(change) {
  const scroll = element("scroll");
  const isAtBottom = scroll.scrollHeight - scroll.scrollTop - scroll.clientHeight < 40;
  change();
  if (isAtBottom) scroll.scrollTop = scroll.scrollHeight;
}

function setBusy(isBusy) {
  document.body.classList.toggle("is-busy", isBusy);
  element("stop").hidden = !isBusy;
  element("send").hidden = isBusy;
  element("turns").setAttribute("aria-busy", isBusy);
}

async function copy(button, text) {
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch {
    button.textContent = "Not allowed"; // pages without TLS may not, except on this machine
  }
  setTimeout(() => { button.textContent = "Copy"; }, 1500);
}

function showOptions(isShown) {
  element("options").hidden = !isShown;
  element("toggle-options").setAttribute("aria-expanded", isShown);
}

function fitFields() {
  element("schema-field").hidden = element("response-format").value !== "json_schema";
  element("tools-example").hidden = element("tools").value !== ""; // it would replace what is there
}

function fitPrompt() {
  const prompt = element("prompt");
  prompt.style.height = "auto";
  prompt.style.height = `${prompt.scrollHeight}px`;
  element("send").disabled = !prompt.value.trim() && !pictures.length;
}

function labelOf(input) { return document.querySelector(`label[for="${input.id}"]`).firstChild.textContent.trim(); }
function duration(ms) { return ms < 1000 ? `${ms < 10 ? ms.toFixed(1) : Math.round(ms)} ms` : `${(ms / 1000).toFixed(2)} s`; }
function rate(value) { return value === null ? "" : value < 10 ? value.toFixed(1) : Math.round(value).toLocaleString("en"); }

// ---- the live view ---------------------------------------------------------------------------------------

async function watchServer() {
  let interval = STATS_INTERVAL_MS;
  if (!document.hidden) {
    try {
      const response = await fetch("/stats", { headers: headers(), signal: AbortSignal.timeout(STATS_TIMEOUT_MS) });
      if (!response.ok) throw await problemOf(response);
      showStats(await response.json());
    } catch (error) {
      showStats({ model: null, unready_reason: null, requests: null, kv_cache: null, services: null }, error instanceof Problem ? error.message : "The server cannot be reached.");
      interval = SLOW_STATS_INTERVAL_MS;
    }
  }
  setTimeout(watchServer, interval);
}

function showStats(stats, failure = null) {
  const state = element("state");
  state.dataset.state = failure ? "away" : stats.unready_reason ? "waiting" : "ready";
  state.textContent = failure ? "no answer" : stats.unready_reason ? "not ready" : "ready";
  state.title = failure ?? stats.unready_reason ?? "";
  if (stats.model) element("model").textContent = stats.model;
  element("num-running").textContent = stats.requests?.num_running ?? "–";
  element("num-waiting").textContent = stats.requests?.num_waiting ?? "–";
  const cache = stats.kv_cache;
  const usage = cache ? (cache.num_blocks - cache.num_free_blocks) / cache.num_blocks : 0;
  element("kv-meter").value = usage;
  element("kv-usage").textContent = cache ? percent(usage) : "–";
  showServer(stats);
}

function percent(share) { return `${(100 * share).toFixed(share > 0 && share < .1 ? 1 : 0)} %`; }

// ---- the server beside the chat --------------------------------------------------------------------------

const stepRates = []; // steps per second of the last readings, oldest first
let lastSteps = null; // { count, at } of the reading before; null: there is none to compare with

function showServer({ requests, kv_cache: cache, services }) {
  const rates = stepRate(requests);
  element("step-rate").textContent = rates === null ? "–" : rate(rates);
  element("queue").textContent = requests ? `${requests.num_running}, ${requests.num_waiting}` : "–";
  element("num-preemptions").textContent = requests?.num_preemptions ?? "–";
  const used = cache ? (cache.num_blocks - cache.num_free_blocks) * cache.block_size : 0;
  element("cache-tokens").textContent = cache ? `${count(used)} of ${count(cache.num_blocks * cache.block_size)} tokens` : "–";
  const prompts = cache ? cache.num_cached_tokens + cache.num_computed_tokens : 0;
  element("hit-rate").textContent = prompts ? percent(cache.num_cached_tokens / prompts) : "–";
  const most = Math.max(1, ...stepRates);
  const points = stepRates.map((each, index) => `${60 - stepRates.length + index + 1},${(19.5 - 19 * each / most).toFixed(2)}`);
  element("steps-plot").firstElementChild.setAttribute("points", points.join(" "));
  element("services").hidden = !services;
  element("services").tBodies[0].replaceChildren(...(services ?? []).map(serviceRow));
}

// Of the time since the reading before; null at the first reading, and after a restart, when counting begins anew.
function stepRate(requests) {
  const now = requests && { count: requests.num_steps, at: performance.now() };
  const before = lastSteps;
  lastSteps = now;
  if (!now || !before || now.count < before.count || now.at <= before.at) return null;
  const perSecond = 1000 * (now.count - before.count) / (now.at - before.at);
  stepRates.push(perSecond);
  if (stepRates.length > 60) stepRates.shift();
  return perSecond;
}

function serviceRow({ role, num_restarts: numRestarts, is_running: isRunning, standby }) {
  const row = document.createElement("tr");
  for (const text of [role.replace("attn_", "attention_").replace("_", " "), isRunning ? String(numRestarts) : `${numRestarts}, down`, standby ?? ""]) {
    row.insertCell().textContent = text;
  }
  return row;
}

function count(value) { return value.toLocaleString("en"); }

// ---- events ----------------------------------------------------------------------------------------------

function ask(question) {
  if (current || !(question.trim() || pictures.length)) return;
  element("prompt").value = "";
  const shown = question.trim();
  answer(addTurn(shown, shown, takePictures()));
}

element("ask").addEventListener("submit", (event) => { event.preventDefault(); ask(element("prompt").value); });
element("fields").addEventListener("submit", (event) => event.preventDefault()); // Enter in a field
element("prompt").addEventListener("input", fitPrompt);
element("prompt").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return; // an input method uses Enter too
  event.preventDefault();
  ask(element("prompt").value);
});
element("stop").addEventListener("click", () => { current?.abort(); element("prompt").focus(); });
element("new-chat").addEventListener("click", () => {
  current?.abort();
  turns.length = 0;
  takePictures();
  element("turns").replaceChildren();
  element("welcome").hidden = false;
  element("prompt").focus();
});
element("examples").addEventListener("click", (event) => {
  const button = event.target.closest("button");
  if (button) { ask(button.textContent); element("prompt").focus(); }
});
element("toggle-options").addEventListener("click", () => {
  showOptions(element("options").hidden);
  if (!element("options").hidden) element("system").focus();
});
element("tools-example").addEventListener("click", () => {
  element("tools").value = JSON.stringify(TOOLS_EXAMPLE, null, 2);
  element("tools").dispatchEvent(new Event("input", { bubbles: true })); // which keeps it
  element("tools").setSelectionRange(0, 0); // shows its beginning
  element("tools").focus();
});
element("fields").addEventListener("input", fitFields);
element("close-options").addEventListener("click", () => { showOptions(false); element("toggle-options").focus(); });
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || event.isComposing) return;
  if (current) current.abort();
  else if (!element("options").hidden && matchMedia("(max-width: 56rem)").matches) element("close-options").click();
});

// A page that is left may be kept for a way back, with its request.
addEventListener("pagehide", () => current?.abort());

for (const input of document.querySelectorAll("aside :is(input, textarea, select)")) {
  input.value = sessionStorage.getItem(input.id) ?? input.value;
  input.addEventListener("input", () => sessionStorage.setItem(input.id, input.value));
}
fitFields();
showOptions(matchMedia("(min-width: 72rem)").matches);
fitPrompt();
watchServer();
