// One recording on the screen: its tokens at a frame, and the number of edits at every step.

import { nearestInLine } from "./editor.js";

export const BINS = 10;
const SVG = "http://www.w3.org/2000/svg";

export class Pane {
  constructor(name, card, separator = "") {
    Object.assign(this, { name, card, separator, recording: null, other: null });
    Object.assign(this, { frame: 0, colour: "step", scale: 1, focus: 0 });
    this.element = make("article", "pane");
    this.head = make("header", "pane-head");
    this.title = make("h2", "");
    this.stats = make("p", "stats number");
    this.tokens = make("div", "tokens");
    this.tokens.setAttribute("role", "listbox");
    this.bars = document.createElementNS(SVG, "svg");
    this.bars.setAttribute("class", "bars");
    this.bars.setAttribute("preserveAspectRatio", "none");
    this.bars.setAttribute("aria-hidden", "true");
    this.head.append(this.title, this.stats);
    this.element.append(this.head, this.tokens, this.bars);
    this.tokens.addEventListener("keydown", (event) => this.#key(event));
    for (const kind of ["pointerover", "focusin", "pointerout", "focusout"]) {
      const shown = kind === "pointerover" || kind === "focusin";
      this.tokens.addEventListener(kind, (event) => this.#point(event.target.closest?.(".token"), shown));
    }
  }

  show(recording) {
    Object.assign(this, { recording, frame: 0, focus: 0, spans: [], drawn: new Map() });
    this.tokens.replaceChildren();
    this.bars.replaceChildren();
    this.tokens.setAttribute("aria-label", `Tokens of result ${this.name}`);
    this.title.textContent = this.name;
  }

  // Draw the text with a span for each position of a gap, once the server has named the positions.
  layout() {
    const slots = [...this.recording.slots];
    for (const part of this.recording.parts) {
      if ("text" in part) {
        this.tokens.append(make("span", "given", part.text));
        continue;
      }
      for (const position of slots.splice(0, part.gap)) {
        const span = make("span", "token");
        span.setAttribute("role", "option");
        span.tabIndex = this.spans.length === 0 ? 0 : -1;
        span.dataset.position = position;
        this.spans.push(span);
        this.tokens.append(span);
      }
    }
  }

  draw(frame, { colour, scale }) {
    const { recording } = this;
    if (!recording?.slots.length) return;
    if (!this.spans.length) this.layout();
    const restyle = colour !== this.colour || scale !== this.scale || recording.length !== this.length;
    Object.assign(this, { frame, colour, scale, length: recording.length });
    for (const span of this.spans) this.#drawToken(span, restyle);
    this.#drawBars();
    this.#drawStats();
  }

  #drawToken(span, restyle) {
    const { recording, frame } = this;
    const position = Number(span.dataset.position);
    const entry = recording.at(position, frame);
    const last = recording.isDone ? recording.at(position, recording.frames.length) : null;
    const key = entry ?? last;
    if (this.drawn.get(span) === key && span.classList.contains("mask") === !entry && !restyle) return;
    this.drawn.set(span, key);
    const wasMask = span.classList.contains("mask");
    span.classList.toggle("mask", !entry);
    span.setAttribute("aria-selected", "false");
    span.setAttribute("aria-label", entry ? this.#describe(entry) : "mask");
    const bin = entry ? this.#bin(entry) : null;
    if (bin === null) delete span.dataset.bin;
    else span.dataset.bin = bin;
    // A mask of a finished run has the width of the token that it becomes, so that lines stay while time moves.
    const [space, ink] = key ? split(this.separator + key.edit.text) : [" ", ""];
    span.classList.toggle("unknown", !key);
    span.replaceChildren(space, make("span", wasMask && entry ? "ink fresh" : "ink", ink));
  }

  #bin(entry) {
    if (this.colour === "none") return null;
    const { entropy } = entry.edit;
    if (this.colour === "entropy" && typeof entropy !== "number") return null;
    const share = this.colour === "step" ? (entry.frame - 1) / Math.max(1, this.length - 1) : entropy / this.scale;
    return Math.max(0, Math.min(BINS - 1, Math.floor(share * BINS)));
  }

  #describe({ edit, step }) {
    const entropy = typeof edit.entropy === "number" ? `, entropy ${edit.entropy.toFixed(2)} nats` : "";
    return `${spoken(edit.text)}, step ${step}${entropy}`;
  }

  #drawBars() {
    const { frames, length } = this.recording;
    const most = Math.max(1, ...frames.map((frame) => frame.edits));
    this.bars.setAttribute("viewBox", `0 0 ${Math.max(1, length)} 100`);
    while (this.bars.children.length < frames.length) this.bars.append(document.createElementNS(SVG, "rect"));
    frames.forEach(({ edits }, i) => {
      const height = edits ? 14 + (86 * edits) / most : 3;
      const bin = Math.min(BINS - 1, Math.floor((i / Math.max(1, length - 1)) * BINS));
      const values = { x: i + 0.08, width: 0.84, y: 100 - height, height, "data-bin": bin };
      const bar = this.bars.children[i];
      for (const [name, value] of Object.entries(values)) bar.setAttribute(name, value);
      bar.classList.toggle("ahead", i >= this.frame);
    });
  }

  #drawStats() {
    const { done, total, seconds, seed, isStopped, isDone } = this.recording;
    const entropies = this.recording.entropies();
    const mean = entropies.reduce((sum, value) => sum + value, 0) / entropies.length;
    const facts = [`${done}/${total} calls`, `${seconds.toFixed(1)} s`, `seed ${seed}`];
    if (isDone && entropies.length) facts.push(`mean entropy ${mean.toFixed(2)} nats`);
    if (isDone && this.other?.isDone) {
      facts.push(`${this.recording.agreement(this.other)}/${this.recording.slots.length} tokens as in A`);
    }
    if (isStopped) facts.unshift("stopped");
    this.stats.textContent = facts.join(" · ");
  }

  // Details of a token -----------------------------------------------------------------------------------------------

  #point(span, shown) {
    const entry = span ? this.recording.at(Number(span.dataset.position), this.frame) : null;
    if (!shown || !entry) this.card.hide();
    else this.card.show(span, entry, this.recording);
  }

  #key(event) {
    const { key } = event;
    const move = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[key];
    let target = null;
    if (move) target = Math.max(0, Math.min(this.spans.length - 1, this.focus + move));
    else if (key === "ArrowDown" || key === "ArrowUp") {
      target = nearestInLine(this.spans, this.focus, key === "ArrowDown");
    }
    if (target === null || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    this.spans[this.focus].tabIndex = -1;
    this.focus = target;
    this.spans[target].tabIndex = 0;
    this.spans[target].focus();
  }
}

// The card beside a token: when it appeared, entropy, and what else was probable.
export class Card {
  constructor(element) {
    this.element = element;
    element.addEventListener("pointerleave", () => this.hide());
  }

  show(span, { edit, step, t }, recording) {
    clearTimeout(this.timer);
    const facts = [`step ${step} of ${recording.lastStep}`, `t ${t.toFixed(2)}`];
    if (typeof edit.entropy === "number") facts.push(`${edit.entropy.toFixed(2)} nats`);
    const head = make("p", "card-head");
    head.append(make("span", "card-token", visible(edit.text)));
    if (typeof edit.probability === "number") head.append(make("span", "number", percent(edit.probability)));
    this.element.replaceChildren(head, make("p", "card-facts number", facts.join(" · ")));
    if (edit.alternatives?.length) {
      const list = make("ol", "alternatives");
      list.append(...edit.alternatives.map(([text, p]) => alternative(text, p, text === edit.text)));
      this.element.append(list);
    }
    this.element.hidden = false;
    this.owner?.removeAttribute("aria-describedby");
    this.owner = span;
    span.setAttribute("aria-describedby", "card");
    this.#place(span.getClientRects());
  }

  #place(lines) {
    const box = [...lines].at(-1);
    const { offsetWidth: width, offsetHeight: height } = this.element;
    const left = Math.max(8, Math.min(box.left, innerWidth - width - 8));
    const below = box.bottom + 4;
    const top = below + height > innerHeight ? Math.max(8, box.top - height - 4) : below;
    this.element.style.setProperty("left", `${left + scrollX}px`);
    this.element.style.setProperty("top", `${top + scrollY}px`);
  }

  hide() {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => {
      if (this.element.matches(":hover")) return;
      this.dismiss();
    }, 120);
  }

  dismiss() {
    this.element.hidden = true;
    this.owner?.removeAttribute("aria-describedby");
  }
}

function alternative(text, p, isDrawn) {
  const item = make("li", isDrawn ? "drawn" : "");
  item.append(make("span", "alternative", visible(text ?? "mask")), make("span", "number", percent(p)));
  item.style.setProperty("--p", p);
  return item;
}

function percent(p) {
  return p < 5e-4 ? "< 0.1 %" : `${(100 * p).toFixed(1)} %`;
}

export function make(name, className, text) {
  const element = document.createElement(name);
  if (className) element.className = className;
  if (text !== undefined) element.textContent = text;
  return element;
}

// White space before a token is not coloured; a token of white space alone is.
function split(text) {
  const ink = text.trimStart();
  if (!ink) return ["", text === "\n" ? "↵\n" : text];
  return [text.slice(0, text.length - ink.length), ink];
}

function visible(text) {
  return text.replaceAll("\n", "↵").replaceAll("\t", "⇥").replaceAll(" ", "␣");
}

// For screen readers.
function spoken(text) {
  return text.trim() || (text.includes("\n") ? "line break" : "space");
}
