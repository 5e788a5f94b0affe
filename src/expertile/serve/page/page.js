"use strict";
const $ = id => document.getElementById(id);
const KEPT = 120;  // points of a chart, one a second
const history = { rate: [], ttft: [], queue: [], compiles: [] };
let key = "", before = null, plansShown = "", asking = null;

const headers = () => (key ? { Authorization: "Bearer " + key } : {});
const short = number => number === null ? "–" : number >= 100 ? Math.round(number).toString() : number.toFixed(number % 1 ? 1 : 0);

async function look() {
  try {
    const answer = await fetch("status", { headers: headers() });
    $("key-box").hidden = answer.status !== 401;
    if (answer.ok) show(await answer.json());
    else say(answer.status === 401 ? "needs a key" : "status " + answer.status, "");
  } catch { say("no answer", "broken"); }
  setTimeout(look, document.hidden ? 5000 : 1000);
}

function say(text, kind) {
  $("state").textContent = text;
  $("state").className = "state " + kind;
}

function show(status) {
  const now = performance.now() / 1000;
  $("model").textContent = document.title = status.model;
  const facts = [status.device, status.context && `${status.context} tokens of context`, `${status.running} of ${status.slots} slots in use`,
    status.quant !== "none" && status.quant, status.guard && `guard: ${status.guard}`, `expertile ${status.version}`];
  $("facts").textContent = facts.filter(Boolean).join(" · ");
  say(status.why || status.state, status.state);
  if (before) note("rate", Math.max(0, status.generated_tokens - before.tokens) / (now - before.now));
  before = { tokens: status.generated_tokens, now };
  note("ttft", status.recent.ttft_p50_ms);
  note("queue", status.waiting);
  note("compiles", status.compiles);
  $("go").disabled = status.state !== "ready" || asking !== null;
  showPlans(status.plans);
}

function note(name, value) {
  const points = history[name];
  points.push(value);
  if (points.length > KEPT) points.shift();
  $(name + "-now").textContent = short(value);
  draw($(name), points);
}

function draw(svg, points) {
  const most = Math.max(1, ...points.filter(value => value !== null));
  let path = "", pen = "M";
  points.forEach((value, index) => {
    if (value === null) { pen = "M"; return; }
    path += `${pen}${KEPT - points.length + index},${40 - 38 * value / most}`;
    pen = "L";
  });
  svg.setAttribute("viewBox", `0 0 ${KEPT - 1} 40`);
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("aria-label", `${svg.id}, at most ${short(most)} in the last two minutes`);
  svg.innerHTML = `<line x1="0" y1="40" x2="${KEPT - 1}" y2="40"/><path d="${path}"/>`;
}

function element(name, text, ...children) {
  const made = document.createElement(name);
  if (text) made.textContent = text;
  made.append(...children);
  return made;
}

function showPlans(plans) {
  const text = JSON.stringify(plans);
  if (text === plansShown) return;
  plansShown = text;
  const parts = [];
  let group = "";
  for (const plan of plans) {
    if (group !== plan.layers + plan.problem) {
      group = plan.layers + plan.problem;
      parts.push(element("h3", "", element("code", plan.layers), ` ${plan.count} layers: ${plan.problem}`));
    }
    const tokens = plan.tokens === 1 ? "1 token" : `${plan.tokens} tokens`;
    parts.push(element("details", "", element("summary", "", `${tokens} a step: `, element("code", plan.plan)), element("pre", plan.reasons)));
  }
  $("plans").replaceChildren(...parts);
}

$("key-form").addEventListener("submit", event => {
  event.preventDefault();
  key = $("key").value;
  $("key").value = "";
});

$("ask").addEventListener("submit", async event => {
  event.preventDefault();
  if (asking) return;
  asking = new AbortController();
  $("go").disabled = true;
  $("stop").hidden = false;
  $("answer").textContent = $("usage").textContent = "";
  $("answer").className = "";
  try { await ask($("kind").value === "chat"); }
  catch (error) {
    if (error.name !== "AbortError") { $("answer").className = "failed"; $("answer").textContent += error.message; }
  }
  asking = null;
  $("go").disabled = false;
  $("stop").hidden = true;
});
$("stop").addEventListener("click", () => asking && asking.abort());

async function ask(chat) {
  const text = $("prompt").value;
  const body = { stream: true, stream_options: { include_usage: true }, max_tokens: Number($("tokens").value),
    temperature: Number($("temperature").value), ...(chat ? { messages: [{ role: "user", content: text }] } : { prompt: text }) };
  const started = performance.now();
  const answer = await fetch(chat ? "v1/chat/completions" : "v1/completions", {
    method: "POST", headers: { "Content-Type": "application/json", ...headers() }, body: JSON.stringify(body), signal: asking.signal });
  if (!answer.ok) throw new Error((await answer.json()).error.message);
  let first = null;
  for await (const chunk of chunks(answer.body)) {
    if (chunk.error) throw new Error(chunk.error.message);
    const choice = chunk.choices[0];
    const piece = choice && (chat ? choice.delta.content : choice.text);
    if (piece) { first = first || performance.now(); $("answer").textContent += piece; }
    if (chunk.usage) {
      const made = chunk.usage.completion_tokens, ms = Math.round((first || performance.now()) - started);
      const rate = made > 1 && first ? `, ${short((made - 1) / ((performance.now() - first) / 1000))} tokens/s` : "";
      $("usage").textContent = `${chunk.usage.prompt_tokens} tokens in, ${made} out, first after ${ms} ms${rate}`;
    }
  }
}

async function* chunks(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (held + value).split("\n");
    held = lines.pop();
    for (const line of lines)
      if (line.startsWith("data: ") && line !== "data: [DONE]") yield JSON.parse(line.slice(6));
  }
}

look();
