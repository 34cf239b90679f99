// A first text that the model at hand can read: the first candidate whose characters its tokenizer knows and that fits.

import { countTokens } from "./api.js";
import { parse } from "./template.js";

// […] is cut out.
const CANDIDATES = [
  "Once upon a time, there was a little girl named Lily. She[ loved to play outside in the park]. One day, she" +
    '[ found a big red ball and] was very happy. Her mom said, "[You can share it with your friend]."',
  "Once upon a time, there was a little[ girl who loved to] play. She[ was very] happy.",
  "once upon a time there was a[ little girl who] loved to play",
  "The cat[ sat on] the mat.",
  "the cat[ sat on] the mat",
  "ACGTTGCA[ACGGTACA]TTGACCTA",
  "CC(=O)O[c1ccccc1]C(=O)O",
  "CC(=O)[NC]C",
  "1 2 [3 4] 5 6",
];

export async function example(model, skip = 0) {
  const found = [];
  for (const text of CANDIDATES) {
    const parts = await cut(text, model.length).catch(() => null);
    if (parts) found.push(parts);
    if (found.length > skip) break;
  }
  return found.length ? found[skip % found.length] : noise(model);
}

// One gap and nothing else, which every model can fill.
export function noise(model) {
  return parse(`{${Math.min(model.length, 64)}}`);
}

async function cut(text, longest) {
  const parts = text.split(/[[\]]/).map((piece, i) => (i % 2 ? { gap: 0, was: piece } : { text: piece }));
  let length = 0;
  for (const part of parts) {
    const count = await countTokens(part.text ?? part.was);
    if ("gap" in part) part.gap = count;
    length += count;
  }
  return length > longest ? null : parts.filter((part) => part.text !== "");
}
