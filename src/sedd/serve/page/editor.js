// The text with its gaps: a list of words to cut gaps from, or a text field.

import { countTokens } from "./api.js";
import { format, keepReplaced, normalize, parse, pieces } from "./template.js";

const DEFAULT_GAP = 8;
const HINTS = {
  empty: "Nothing here yet. Choose Write, or take an example.",
  cut: "Click a word, or drag over several, to cut a gap.",
  write: "{8} is a gap of eight tokens.",
};

export class Editor {
  constructor(find, onChange) {
    this.words = find("#words");
    this.source = find("#source");
    this.hint = find("#hint");
    this.bar = find("#gap-bar");
    this.length = find("#gap-length");
    this.restoreButton = find("#gap-restore");
    this.onChange = onChange;
    this.parts = [];
    this.mode = "cut";
    this.focus = 0; // the piece that has the keyboard's focus
    this.anchor = null; // the other end of the selected range
    this.source.addEventListener("input", () => this.#typed());
    this.words.addEventListener("keydown", (event) => this.#key(event));
    this.words.addEventListener("focusin", (event) => this.#focused(event));
    this.#addPointer();
    this.length.addEventListener("change", () => this.#setLength(Number(this.length.value)));
    find("#gap-less").addEventListener("click", () => this.#changeLength(-1));
    find("#gap-more").addEventListener("click", () => this.#changeLength(1));
    this.restoreButton.addEventListener("click", () => this.#restore(this.focus));
  }

  get text() {
    return format(this.parts);
  }

  set text(source) {
    this.#replace(parse(source));
  }

  get hasGap() {
    return this.parts.some((part) => "gap" in part);
  }

  setParts(parts) {
    this.#replace(normalize(parts));
  }

  setMode(mode) {
    this.mode = mode;
    this.words.hidden = mode !== "cut";
    this.source.hidden = mode === "cut";
    if (mode === "write") this.source.value = this.text;
    this.#draw();
  }

  // Insert a gap: at the caret or in place of the selection of the text field, or after the focused word.
  async insertGap() {
    if (this.mode === "write") {
      const { selectionStart: start, selectionEnd: end, value } = this.source;
      const gap = start < end ? await tokensOf(value.slice(start, end)) : DEFAULT_GAP;
      this.source.setRangeText(`{${gap}}`, start, end, "end");
      this.#typed();
      this.source.focus();
      return;
    }
    const list = pieces(this.parts);
    const place = Math.min(this.focus + 1, list.length);
    list.splice(place, 0, { gap: DEFAULT_GAP, was: null });
    this.#update(list, place);
  }

  // Changes ----------------------------------------------------------------------------------------------------------

  #replace(parts) {
    [this.parts, this.focus, this.anchor] = [parts, 0, null];
    if (this.mode === "write") this.source.value = this.text;
    this.#draw();
    this.onChange();
  }

  #typed() {
    this.parts = keepReplaced(parse(this.source.value), this.parts);
    this.#showHint();
    this.onChange();
  }

  #update(list, focus) {
    this.parts = normalize(list);
    this.anchor = null;
    this.focus = Math.max(0, Math.min(focus, pieces(this.parts).length - 1));
    this.#draw();
    this.#focusPiece();
    this.onChange();
  }

  async #cut(from, to) {
    const list = pieces(this.parts);
    const [first, last] = [Math.min(from, to), Math.max(from, to)];
    const taken = list.slice(first, last + 1);
    const gaps = taken.filter((piece) => "gap" in piece);
    const was = taken.map((piece) => ("gap" in piece ? (piece.was ?? "") : piece.text)).join("");
    const text = taken.map((piece) => ("gap" in piece ? "" : piece.text)).join("");
    const gap = gaps.reduce((sum, piece) => sum + piece.gap, 0) + (text ? await tokensOf(text) : 0);
    list.splice(first, last - first + 1, { gap, was });
    this.#update(list, first - ("gap" in (list[first - 1] ?? {}) ? 1 : 0));
  }

  #restore(index) {
    const list = pieces(this.parts);
    const { was } = list[index];
    list.splice(index, 1, ...(was ? [{ text: was }] : []));
    this.#update(list, index);
  }

  #changeLength(by) {
    const piece = pieces(this.parts)[this.focus];
    if (piece && "gap" in piece) this.#setLength(piece.gap + by);
  }

  #setLength(gap) {
    const list = pieces(this.parts);
    const piece = list[this.focus];
    if (!piece || !("gap" in piece)) return;
    const valid = Number.isInteger(gap) && gap >= 1 && gap <= 999999;
    list[this.focus] = { gap: valid ? gap : piece.gap, was: piece.was };
    const focused = document.activeElement;
    this.#update(list, this.focus);
    if (this.bar.contains(focused)) focused.focus();
  }

  // Drawing ----------------------------------------------------------------------------------------------------------

  #draw() {
    const list = pieces(this.parts);
    this.words.replaceChildren(...list.map((piece, index) => this.#element(piece, index)));
    this.words.classList.toggle("is-empty", !list.length);
    this.#mark();
  }

  #element(piece, index) {
    const element = document.createElement("span");
    const isGap = "gap" in piece;
    element.setAttribute("role", "option");
    element.setAttribute("aria-selected", String(isGap));
    element.dataset.index = index;
    element.className = isGap ? "piece gap" : "piece";
    element.textContent = isGap ? String(piece.gap) : piece.text;
    if (isGap) {
      element.setAttribute("aria-label", `gap of ${piece.gap} ${piece.gap === 1 ? "token" : "tokens"}`);
      if (piece.was) element.title = `was: ${piece.was.trim()}`;
    }
    return element;
  }

  #mark(hovered = null) {
    const [from, to] = [this.anchor ?? this.focus, hovered ?? this.focus].sort((a, b) => a - b);
    [...this.words.children].forEach((element, index) => {
      element.tabIndex = index === this.focus ? 0 : -1;
      element.classList.toggle("range", this.anchor !== null && index >= from && index <= to);
    });
    this.#showHint();
  }

  #showHint() {
    const piece = this.mode === "cut" ? pieces(this.parts)[this.focus] : null;
    const inWords = this.words.contains(document.activeElement) || this.bar.contains(document.activeElement);
    const isGap = Boolean(piece && "gap" in piece && inWords);
    this.bar.hidden = !isGap;
    this.hint.hidden = isGap;
    this.hint.textContent = HINTS[this.mode === "cut" && !this.parts.length ? "empty" : this.mode];
    if (isGap) {
      this.length.value = piece.gap;
      this.restoreButton.textContent = piece.was ? "Restore words" : "Remove";
    }
  }

  #focusPiece() {
    this.words.children[this.focus]?.focus();
  }

  #focused(event) {
    const index = Number(event.target.dataset.index);
    if (Number.isInteger(index)) this.focus = index;
    this.#mark();
  }

  // Keyboard ---------------------------------------------------------------------------------------------------------

  #key(event) {
    const list = pieces(this.parts);
    const isGap = "gap" in (list[this.focus] ?? {});
    const { key } = event;
    const target = this.#target(key, list.length);
    if (event.ctrlKey || event.metaKey || event.altKey || !list.length) return;
    if (target !== null) {
      this.anchor = event.shiftKey ? (this.anchor ?? this.focus) : null;
      this.focus = target;
      this.#focusPiece();
      this.#mark();
    } else if (key === "Enter" || key === " ") {
      if (isGap && this.anchor === null) this.#restore(this.focus);
      else this.#cut(this.anchor ?? this.focus, this.focus);
    } else if (isGap && (key === "+" || key === "=")) this.#changeLength(1);
    else if (isGap && key === "-") this.#changeLength(-1);
    else if (key === "Escape" && this.anchor !== null) {
      this.anchor = null;
      this.#mark();
      event.stopPropagation();
    } else if (isGap && (key === "Delete" || key === "Backspace")) {
      list.splice(this.focus, 1);
      this.#update(list, this.focus);
    } else return;
    event.preventDefault();
  }

  #target(key, count) {
    const move = { ArrowLeft: -1, ArrowRight: 1 }[key];
    if (move) return Math.max(0, Math.min(count - 1, this.focus + move));
    if (key === "Home") return 0;
    if (key === "End") return count - 1;
    const isVertical = key === "ArrowUp" || key === "ArrowDown";
    return isVertical ? nearestInLine(this.words.children, this.focus, key === "ArrowDown") : null;
  }

  // Pointer ----------------------------------------------------------------------------------------------------------

  #addPointer() {
    let start = null;
    const under = (event) => {
      const element = document.elementFromPoint(event.clientX, event.clientY)?.closest(".piece");
      return element && this.words.contains(element) ? Number(element.dataset.index) : null;
    };
    this.words.addEventListener("pointerdown", (event) => {
      if (event.button !== 0) return;
      start = under(event);
      if (start === null) return;
      this.anchor = start;
      this.focus = start;
      this.#mark();
    });
    window.addEventListener("pointermove", (event) => {
      const index = start === null ? null : under(event);
      if (index !== null) this.#mark(index);
    });
    window.addEventListener("pointerup", (event) => {
      if (start === null) return;
      const [from, to] = [start, under(event) ?? start];
      start = null;
      this.anchor = null;
      if (from === to && "gap" in pieces(this.parts)[from]) {
        this.focus = from;
        this.#focusPiece();
        this.#mark();
      } else this.#cut(from, to);
    });
    window.addEventListener("pointercancel", () => {
      [start, this.anchor] = [null, null];
      this.#mark();
    });
  }
}

// The index of the element that lies nearest in the line above or below.
export function nearestInLine(elements, index, below) {
  const here = elements[index].getBoundingClientRect();
  let best = index;
  let distance = Infinity;
  for (let i = index; elements[i]; i += below ? 1 : -1) {
    const box = elements[i].getBoundingClientRect();
    const lines = below ? box.top - here.bottom : here.top - box.bottom;
    if (lines < -here.height / 2) continue;
    const far = Math.abs(box.left - here.left) + 10 * Math.max(0, lines);
    if (far < distance) [best, distance] = [i, far];
  }
  return best;
}

async function tokensOf(text) {
  try {
    return Math.max(1, await countTokens(text));
  } catch {
    return Math.max(1, Math.ceil(text.length / 4)); // the server will give the reason when the text is sent
  }
}
