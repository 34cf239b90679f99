// Render the TeX that the Markdown extension arithmatex has marked, with the copy of KaTeX beside this file.
function renderMath() {
  for (const element of document.querySelectorAll(".arithmatex")) {
    const source = element.textContent.trim();
    const displayMode = source.startsWith("\\[");
    katex.render(source.slice(2, -2), element, { displayMode, throwOnError: false });
  }
}
document.addEventListener("DOMContentLoaded", renderMath);
