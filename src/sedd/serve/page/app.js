// The page: wires the editor, the settings, the runs and the player together.

import { Problem, countTokens, infill, models, sentence, setKey } from "./api.js";
import { Editor } from "./editor.js";
import { example, noise } from "./examples.js";
import { Card, Pane, make } from "./pane.js";
import { Player } from "./player.js";
import { Recording } from "./recording.js";
import { Settings, newSeed } from "./settings.js";
import { addShortcuts } from "./shortcuts.js";
import { fromFragment, serverTemplate, toFragment } from "./template.js";

const find = (selector) => document.querySelector(selector);
const on = (selector, action) => find(selector).addEventListener("click", action);
const mobile = matchMedia("(max-width: 700px)");
const stacked = matchMedia("(max-width: 1000px)"); // the result is below the text

const card = new Card(find("#card"));
const editor = new Editor(find, () => textChanged());
const player = new Player(find, () => panes.filter((pane) => pane.recording));
let served = [];
let forms = []; // one, or two to compare
let panes = [];
let running = null; // the AbortController of the run
let examples = 0;
let retry = null;

// Start --------------------------------------------------------------------------------------------------------------

async function start() {
  try {
    served = await models();
  } catch (problem) {
    if (problem.status === 401) enterKey(problem, start);
    else complain(problem, start);
    return;
  }
  hideProblem();
  const [{ id, process, length }] = served;
  find("#model-line").textContent = `${id} · ${process} noise · up to ${length} tokens`;
  setForms(1);
  if (!restore()) editor.setParts(await example(served[0]));
  if (mobile.matches) find("#settings").open = false;
}

function setForms(count) {
  const template = find("#settings-form");
  while (forms.length < count) forms.push(new Settings(template, served, settingsChanged));
  forms.length = count;
  forms.forEach((form, i) => (form.legend.textContent = count > 1 ? "AB"[i] : ""));
  find("#forms").replaceChildren(...forms.map((form) => form.element));
  document.body.classList.toggle("comparing", count > 1);
  find("#compare").setAttribute("aria-pressed", String(count > 1));
  find("#compare").textContent = count > 1 ? "Do not compare" : "Compare with a second setting";
  settingsChanged();
}

function compare() {
  if (forms.length === 2) return setForms(1);
  setForms(2);
  const values = forms[0].values;
  const steps = Number(values.steps);
  forms[1].values = { ...values, steps: steps > 4 ? String(Math.floor(steps / 4)) : values.steps };
  return settingsChanged();
}

function settingsChanged() {
  const [a, b] = forms.map((form) => form.values);
  find("#settings-summary").textContent = `${a.steps} steps · T ${a.temperature} · seed ${a.seed || "new"}`;
  for (const [name, input] of Object.entries(forms[1]?.inputs ?? {})) {
    input.classList.toggle("differs", a[name] !== b[name]);
  }
}

let counting = null;

async function textChanged() {
  counting?.abort();
  const { signal } = (counting = new AbortController());
  const problem = find("#text-problem");
  await new Promise((resolve) => setTimeout(resolve, 200));
  if (signal.aborted || !forms.length) return;
  try {
    let count = 0;
    for (const part of editor.parts) count += "gap" in part ? part.gap : await countTokens(part.text, signal);
    const { length } = forms[0].model;
    find("#count").textContent = `${count} / ${length} tokens`;
    problem.hidden = count <= length;
    problem.textContent = `The text has ${count} tokens with its gaps; the model takes up to ${length}. Shorten it.`;
  } catch (error) {
    if (signal.aborted) return;
    find("#count").textContent = "";
    problem.hidden = false;
    problem.textContent = error.message;
  }
}

// Run ----------------------------------------------------------------------------------------------------------------

async function run() {
  if (running || !forms.length) return;
  hideProblem();
  if (!editor.hasGap) {
    complain(new Problem("There is no gap to fill. Click a word to cut one, or insert a gap."));
    return;
  }
  const bodies = [];
  for (const form of forms) {
    try {
      form.complain(null);
      bodies.push({ ...form.body(), template: serverTemplate(editor.parts) });
    } catch (problem) {
      if (!form.complain(problem)) complain(problem);
      return;
    }
  }
  const control = (running = new AbortController());
  prepare();
  announce("Filling the gaps");
  const ends = await Promise.allSettled(bodies.map((body, i) => fill(panes[i], body, control.signal)));
  running = null;
  for (const { recording } of panes) recording.isStopped = !recording.isDone;
  setRunning(false);
  player.update();
  const failed = ends.findIndex((end) => end.status === "rejected" && end.reason.name !== "AbortError");
  if (control.signal.aborted) finishCanceled();
  else if (failed >= 0) complainAbout(ends[failed].reason, forms[failed]);
  else announce(panes.map((pane) => `Result ${pane.name}: ${pane.recording.text}`).join(". "));
}

function prepare() {
  notify("");
  const separator = forms[0].model.tokenizer === "ints" ? " " : "";
  panes = forms.map((form, i) => new Pane(forms.length > 1 ? "AB"[i] : "", card, separator));
  panes.forEach((pane, i) => pane.show(new Recording(structuredClone(editor.parts), forms[i].values)));
  if (panes.length > 1) panes[1].other = panes[0].recording;
  find("#panes").replaceChildren(...panes.map((pane) => pane.element));
  find("#empty").hidden = true;
  find("#player").hidden = find("#colours").hidden = false;
  setRunning(true);
  player.follow();
  if (stacked.matches) find("#result").scrollIntoView({ block: mobile.matches ? "start" : "nearest" });
}

async function fill(pane, body, signal) {
  const { recording } = pane;
  for await (const [event, data] of infill(body, signal)) {
    recording.apply(event, data);
    player.update();
    showProgress();
  }
  if (recording.failed) throw new Problem(sentence(recording.failed));
  if (!recording.isDone) throw new Problem("The server stopped before the text was complete. Try again.");
}

function finishCanceled() {
  if (panes.every((pane) => !pane.recording.frames.length)) clearResult();
  notify("Canceled");
}

function clearResult() {
  panes = [];
  find("#panes").replaceChildren();
  find("#empty").hidden = false;
  find("#player").hidden = find("#colours").hidden = true;
}

function setRunning(is) {
  find("#run").disabled = is;
  find("#cancel").hidden = !is;
  find("#progress").hidden = !is;
  document.body.classList.toggle("running", is);
  if (is) showProgress();
}

function showProgress() {
  const [done, total] = ["done", "total"].map((name) => panes.reduce((sum, pane) => sum + pane.recording[name], 0));
  const bar = find("#progress");
  bar.setAttribute("aria-valuemax", total);
  bar.setAttribute("aria-valuenow", done);
  bar.style.setProperty("--share", total ? done / total : 0);
  find("#progress-text").textContent = total ? `${done}/${total} network calls` : "waiting for a slot…";
}

// Problems and messages ----------------------------------------------------------------------------------------------

function complainAbout(problem, form) {
  if (panes.every((pane) => !pane.recording.frames.length)) clearResult();
  if (problem.status === 401) enterKey(problem, run);
  else if (!form.complain(problem)) complain(problem, run);
}

function complain(problem, action = null) {
  retry = action;
  const wait = problem.retryAfter ? ` Try again in ${problem.retryAfter} s.` : "";
  find("#problem-text").textContent = problem.message + (problem.message.includes("try again") ? "" : wait);
  find("#problem-action").hidden = !action;
  find("#problem").hidden = false;
}

function hideProblem() {
  find("#problem").hidden = true;
}

function enterKey(problem, then) {
  const [dialog, input, message] = ["#key-dialog", "#key", "#key-problem"].map(find);
  message.hidden = !input.value;
  message.textContent = input.value ? "The server does not know this key." : "";
  dialog.addEventListener(
    "close",
    () => {
      if (dialog.returnValue !== "ok") return complain(problem, then);
      setKey(input.value);
      return then();
    },
    { once: true },
  );
  dialog.returnValue = "";
  dialog.showModal();
}

function announce(text) {
  find("#live").textContent = text;
}

let toastTimer = 0;

function notify(text) {
  const toast = find("#toast");
  toast.textContent = text;
  clearTimeout(toastTimer);
  toastTimer = setTimeout(() => (toast.textContent = ""), 4000);
}

// Copy and share -----------------------------------------------------------------------------------------------------

function resultText() {
  return panes.map((pane) => pane.recording.text ?? pane.tokens.textContent).join("\n\n");
}

// The link of what is shown, with the seeds that were used.
function link() {
  const [a, b] = forms.map((form, i) => {
    const seed = panes[i]?.recording.seed;
    const { values } = form;
    return values.seed === "" && seed != null ? { ...values, seed: String(seed) } : values;
  });
  const url = new URL(location.href);
  url.hash = toFragment({ text: editor.text, colour: player.colour, a, b });
  return url.href;
}

async function share() {
  const url = link();
  history.replaceState(null, "", url);
  await copy(url, "Link copied; it holds text, settings and seed");
}

async function copy(text, message) {
  try {
    await navigator.clipboard.writeText(text);
    notify(message);
  } catch {
    notify(text === location.href ? "The link is in the address bar" : "The browser does not allow copying here");
  }
}

function restore() {
  const saved = fromFragment(location.hash);
  if (!saved) return false;
  setForms(saved.b ? 2 : 1);
  forms[0].values = saved.a;
  if (saved.b) forms[1].values = saved.b;
  if (saved.colour) player.colour = saved.colour;
  editor.text = saved.text;
  settingsChanged();
  return true;
}

function edit() {
  const done = panes.find((pane) => pane.recording.isDone);
  if (!done) return;
  editor.setParts([{ text: done.recording.text }]);
  announce("The result is now the text");
}

// Wiring -------------------------------------------------------------------------------------------------------------

function setMode(mode) {
  find(`input[name=mode][value=${mode}]`).checked = true;
  editor.setMode(mode);
}

function drawStages() {
  const words = ["The", "cat", "sat", "on", "the", "mat", "and", "slept."];
  const shown = [[], [1, 5], [0, 1, 3, 5, 7], [0, 1, 2, 3, 4, 5, 6, 7]];
  const times = ["t = 1", "t = ⅔", "t = ⅓", "t = 0"];
  const rows = shown.map((places) => {
    const row = make("li");
    row.dataset.time = times.shift();
    row.append(...words.map((word, i) => make("span", places.includes(i) ? "" : "mask", word)));
    return row;
  });
  find("#stages").replaceChildren(...rows);
}

on("#run", run);
on("#cancel", () => running?.abort());
on("#compare", compare);
on("#insert-gap", () => editor.insertGap());
on("#example", async () => editor.setParts(await example(forms[0].model, ++examples)));
on("#from-noise", () => editor.setParts(noise(forms[0].model)));
on("#clear", () => {
  editor.text = "";
  setMode("write");
  find("#source").focus();
});
on("#copy", () => copy(resultText(), "Text copied"));
on("#share", share);
on("#keep", edit);
on("#problem-close", hideProblem);
on("#problem-action", () => {
  hideProblem();
  retry?.();
});
on("#theme-button", () => {
  find("#theme-button").textContent = `Theme: ${window.seddTheme.next()}`;
});
find("#theme-button").textContent = `Theme: ${window.seddTheme.name}`;
find("#forms").addEventListener("submit", (event) => event.preventDefault());
for (const input of document.querySelectorAll("input[name=mode]")) {
  input.addEventListener("change", () => editor.setMode(input.value));
}
window.addEventListener("hashchange", () => served.length && restore());
addShortcuts(find, {
  run,
  cancel: () => running?.abort(),
  dismiss: () => card.dismiss(),
  reseed: () => {
    forms.forEach((form) => (form.values = { seed: newSeed() }));
    settingsChanged();
  },
  share,
  copy: () => copy(resultText(), "Text copied"),
  compare,
  player,
});
setMode("cut");
drawStages();
start();
