const step = document.getElementById("step"), now = document.getElementById("now");
step.addEventListener("input", () => {
  now.textContent = step.value;
  for (const token of document.querySelectorAll("[data-step]"))
    token.classList.toggle("later", Number(token.dataset.step) > Number(step.value));
});
