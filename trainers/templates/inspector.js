// Picks a sample and lists its tokens. Text reaches the page through textContent only: model output is never markup.
"use strict";
const data = JSON.parse(document.getElementById("samples").textContent);
const MAX_ROWS = 1500;
const COLUMNS = [
  ["logprob", 4, "log-probability after the update, nats"], ["old", 4, "log-probability when it was sampled, scored by the trainer"],
  ["rollout", 4, "log-probability as the generation engine gave it"], ["ref", 4, "log-probability under the reference"],
  ["kl", 4, "old - ref, nats"], ["value", 3, "critic, before this token"], ["reward", 3, "after the KL charge"],
  ["advantage", 3, "as the loss used it"], ["return", 3, "target of the critic"], ["ratio", 4, "exp(logprob - old)"],
];
const $ = (id) => document.getElementById(id);
const add = (parent, tag, text, kind) => {
  const node = document.createElement(tag);
  if (text !== undefined) node.textContent = text;
  if (kind) node.className = kind;
  parent.appendChild(node);
  return node;
};
const fixed = (value, digits) => (value === null ? "" : typeof value === "number" ? value.toFixed(digits) : value);
const visible = (text) => text.replaceAll("\n", "↵").replaceAll("\t", "→").replaceAll(" ", "·");
const options = (select, labels) => {
  select.replaceChildren();
  labels.forEach((label, i) => { add(select, "option", label).value = i; });
};
const state = { run: 0, step: 0, sample: 0 };
const stepsOf = (run) => [...new Set(data[run].samples.map((sample) => sample.step))];
const samplesOf = () => data[state.run].samples.filter((sample) => sample.step === stepsOf(state.run)[state.step]);

function shade(node, advantage, largest) {
  if (typeof advantage !== "number" || !largest) return;
  const strength = Math.min(1, Math.abs(advantage) / largest);
  node.style.backgroundColor = `rgb(var(${advantage > 0 ? "--good" : "--poor"}) / ${(0.6 * strength).toFixed(3)})`;
}

function show() {
  const sample = samplesOf()[state.sample], tokens = sample.tokens, only = $("only").checked;
  const rows = tokens.text.map((_, i) => i).filter((i) => !only || tokens.mask[i]);
  const largest = Math.max(0, ...tokens.advantage.filter((a, i) => tokens.mask[i] && typeof a === "number").map(Math.abs));
  $("about").textContent = `step ${sample.step}, sample ${sample.sample_id}: score ${fixed(sample.score, 3)}, ` +
    `KL ${fixed(sample.kl, 3)} nats, finish: ${sample.finish}, ${sample.num_tokens} tokens`;
  $("scale").textContent = largest ? `advantage −${largest.toFixed(2)} to +${largest.toFixed(2)}` : "no advantages";
  const strip = $("strip"), body = $("tokens");
  strip.replaceChildren();
  body.replaceChildren();
  rows.slice(0, MAX_ROWS).forEach((i) => {
    const tr = add(body, "tr", undefined, tokens.mask[i] ? "" : "off");
    add(tr, "td", i, "num");
    add(tr, "td", tokens.mask[i] ? "1" : "0", "num");
    const text = add(add(tr, "td"), "span", visible(tokens.text[i]), "token");
    add(tr, "td", tokens.id[i] ?? "", "num");
    COLUMNS.forEach(([name, digits]) => {
      const value = tokens[name][i];
      add(tr, "td", fixed(value, digits), typeof value === "string" ? "num odd" : "num");
    });
    add(tr, "td", tokens.clipped[i] ? "clipped" : "", "clip");
    const word = add(strip, "span", tokens.text[i], tokens.mask[i] ? "" : "off");
    word.title = `token ${i}: advantage ${fixed(tokens.advantage[i], 3)}, KL ${fixed(tokens.kl[i], 3)}`;
    if (tokens.mask[i]) [text, word].forEach((node) => shade(node, tokens.advantage[i], largest));
    word.addEventListener("click", () => {
      document.querySelectorAll("tr.here").forEach((row) => row.classList.remove("here"));
      tr.classList.add("here");
      tr.scrollIntoView({ block: "nearest" });
    });
  });
  $("more").textContent = rows.length > MAX_ROWS ? `the first ${MAX_ROWS} of ${rows.length} rows; the rest is in samples.jsonl` : "";
  $("back").disabled = state.step === 0;
  $("forth").disabled = state.step === stepsOf(state.run).length - 1;
}

function pick(run, step, sample) {
  Object.assign(state, { run, step, sample });
  options($("run"), data.map((one) => one.run));
  options($("step"), stepsOf(run));
  state.sample = Math.min(sample, samplesOf().length - 1);
  options($("sample"), samplesOf().map((one) => `${one.sample_id}  (score ${fixed(one.score, 2)})`));
  $("run").value = run;
  $("step").value = step;
  $("sample").value = state.sample;
  show();
}

if (data.length) {
  const head = $("columns");
  [["#"], ["mask", "1: sampled by the policy and trained"], ["token"], ["id"]].forEach(([name, title]) => {
    add(head, "th", name, name === "token" ? "" : "num").title = title ?? "";
  });
  COLUMNS.forEach(([name, , title]) => { add(head, "th", name === "kl" ? "KL" : name, "num").title = title; });
  add(head, "th", "clipped");
  $("run").addEventListener("change", (event) => pick(+event.target.value, stepsOf(+event.target.value).length - 1, 0));
  $("step").addEventListener("change", (event) => pick(state.run, +event.target.value, state.sample));
  $("sample").addEventListener("change", (event) => pick(state.run, state.step, +event.target.value));
  $("back").addEventListener("click", () => pick(state.run, state.step - 1, state.sample));
  $("forth").addEventListener("click", () => pick(state.run, state.step + 1, state.sample));
  $("only").addEventListener("change", show);
  document.querySelectorAll("button.open").forEach((button) => button.addEventListener("click", () => {
    const run = +button.dataset.run, chosen = data[run].samples[+button.dataset.index];
    const step = stepsOf(run).indexOf(chosen.step);
    pick(run, step, data[run].samples.filter((one) => one.step === chosen.step).indexOf(chosen));
    $("inspector").scrollIntoView();
  }));
  $("inspector").hidden = false;
  if (data.length > 1) $("run-choice").hidden = false;
  pick(0, stepsOf(0).length - 1, 0);
}
