// A form of sampling settings. Values are strings, as in links; `body` turns them into fields of a request.

import { Problem } from "./api.js";

const DEFAULTS = { steps: "32", top_p: "1", guidance: "1", label: "", seed: "1" };
const NUMBERS = {
  temperature: { is: (x) => x >= 0 && x <= 100, rule: "a number from 0 to 100" },
  top_p: { is: (x) => x > 0 && x <= 1, rule: "a number above 0 and at most 1" },
  guidance: { is: (x) => x >= 0 && x <= 1000, rule: "a number from 0 to 1000" },
};
const TITLES = { steps: "Steps", temperature: "Temperature", top_p: "Top-p", guidance: "Guidance", seed: "Seed" };

export class Settings {
  constructor(template, models, onChange) {
    this.element = template.content.firstElementChild.cloneNode(true);
    this.legend = this.element.querySelector("legend");
    this.problem = this.element.querySelector(".problem-line");
    this.models = models;
    this.inputs = Object.fromEntries([...this.element.querySelectorAll("[name]")].map((input) => [input.name, input]));
    fill(this.inputs.model, models.map((model) => model.id));
    this.#setModel();
    this.values = { ...DEFAULTS, temperature: String(this.model.temperature) };
    this.element.addEventListener("input", (event) => {
      if (event.target.name === "model") this.#setModel();
      this.complain(null);
      onChange();
    });
    this.element.querySelector("[data-action=dice]").addEventListener("click", () => {
      this.inputs.seed.value = newSeed();
      onChange();
    });
  }

  get model() {
    return this.models.find((model) => model.id === this.inputs.model.value) ?? this.models[0];
  }

  get values() {
    return Object.fromEntries(Object.entries(this.inputs).map(([name, input]) => [name, input.value.trim()]));
  }

  set values(values) {
    if (values.model !== undefined) {
      this.inputs.model.value = values.model;
      if (!this.inputs.model.value) this.inputs.model.value = this.models[0].id;
      this.#setModel();
    }
    for (const [name, value] of Object.entries(values)) {
      const input = this.inputs[name];
      if (!input || name === "model") continue;
      const before = input.value;
      input.value = value;
      if (input.tagName === "SELECT" && input.value !== value) input.value = before; // not a choice of this model
    }
  }

  #setModel() {
    const { samplers, sampler, labels } = this.model;
    fill(this.inputs.sampler, samplers, this.inputs.sampler.value || sampler);
    fill(this.inputs.label, ["", ...labels], this.inputs.label.value);
    this.inputs.label.options[0].textContent = "none";
    for (const element of this.element.querySelectorAll("[data-labels]")) element.hidden = !labels.length;
  }

  // The fields of a request; a value that cannot be sent is a `Problem` with its field.
  body() {
    const { model, sampler, steps, seed, label, guidance, ...numbers } = this.values;
    const body = { model, sampler, steps: readSteps(steps, this.model.limits.steps) };
    if (seed !== "") body.seed = readInteger("seed", seed, 0, Number.MAX_SAFE_INTEGER);
    for (const [name, value] of Object.entries(numbers)) body[name] = readNumber(name, value);
    if (label !== "") Object.assign(body, { label, guidance: readNumber("guidance", guidance) });
    return body;
  }

  // Show what is wrong with a field, or nothing. Returns whether the field is one of these.
  complain(problem) {
    for (const input of Object.values(this.inputs)) input.removeAttribute("aria-invalid");
    const input = problem ? this.inputs[problem.field] : null;
    this.problem.hidden = !input;
    this.problem.textContent = input ? problem.message : "";
    input?.setAttribute("aria-invalid", "true");
    input?.closest("details")?.setAttribute("open", "");
    input?.focus();
    if (input) this.problem.scrollIntoView({ block: "nearest" });
    return Boolean(input);
  }
}

export function newSeed() {
  return String(crypto.getRandomValues(new Uint32Array(1))[0]);
}

function fill(select, names, chosen) {
  select.replaceChildren(...names.map((name) => new Option(name, name)));
  if (names.includes(chosen)) select.value = chosen;
}

function readSteps(text, most) {
  return text === "inf" ? text : readInteger("steps", text, 1, most, ", or inf for one token at a time");
}

function readInteger(name, text, least, most, or = "") {
  const value = Number(text);
  if (/^\d+$/.test(text) && value >= least && value <= most) return value;
  const rule = `a whole number from ${least} to ${most}${or}`;
  throw new Problem(`${TITLES[name]} is “${text}”; it must be ${rule}.`, { field: name });
}

function readNumber(name, text) {
  const value = Number(text);
  if (text !== "" && NUMBERS[name].is(value)) return value;
  throw new Problem(`${TITLES[name]} is “${text}”; it must be ${NUMBERS[name].rule}.`, { field: name });
}
