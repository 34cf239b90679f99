// Shortcuts, and the list that shows them.

const STORED = "sedd-single-keys";
const LISTED = [
  ["Ctrl Enter", "Fill the gaps"],
  ["Esc", "Cancel, or close what is open"],
  ["← → ↑ ↓", "Move between words, or between tokens of the result"],
  ["Shift ← →", "Select several words"],
  ["Enter", "Cut the words, or restore a gap"],
  ["+ −", "Make a gap longer or shorter"],
  ["Delete", "Remove a gap with what it replaced"],
  ["P", "Play and pause"],
  [", .", "One step back, one step forward"],
  ["1 2 3", "Colour by step, by entropy, or not at all"],
  ["N", "New seed"],
  ["B", "Compare with a second setting"],
  ["C", "Copy the text"],
  ["L", "Copy a link"],
  ["?", "This list"],
];

export function addShortcuts(find, actions) {
  const { player } = actions;
  const [dialog, singleKeys] = ["#help-dialog", "#single-keys"].map(find);
  const colours = ["step", "entropy", "none"];
  const keys = {
    p: () => player.toggle(),
    ",": () => player.move(-1),
    ".": () => player.move(1),
    n: actions.reseed,
    b: actions.compare,
    c: actions.copy,
    l: actions.share,
    "?": () => dialog.showModal(),
  };
  colours.forEach((name, i) => (keys[String(i + 1)] = () => (player.colour = name)));

  drawList(find("#shortcuts"));
  find("#help-button").addEventListener("click", () => dialog.showModal());
  singleKeys.checked = localStorage.getItem(STORED) !== "off";
  singleKeys.addEventListener("change", () => localStorage.setItem(STORED, singleKeys.checked ? "on" : "off"));

  document.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
      event.preventDefault();
      actions.run();
    } else if (event.key === "Escape") {
      actions.dismiss();
      if (!document.querySelector("dialog[open]")) actions.cancel();
    } else if (isFree(event) && singleKeys.checked) {
      const action = keys[event.key.toLowerCase()];
      if (!action) return;
      event.preventDefault();
      action();
    }
  });
}

// Whether a key is not meant for a field or a dialog.
function isFree({ target, ctrlKey, metaKey, altKey, defaultPrevented }) {
  const field = target.closest("input:not([type=range], [type=radio]), textarea, select, dialog");
  return !field && !ctrlKey && !metaKey && !altKey && !defaultPrevented;
}

function drawList(list) {
  for (const [keys, text] of LISTED) {
    const [term, meaning] = [document.createElement("dt"), document.createElement("dd")];
    for (const key of keys.split(" ")) {
      term.append(Object.assign(document.createElement("kbd"), { textContent: key }), " ");
    }
    meaning.textContent = text;
    list.append(term, meaning);
  }
}
