// Loaded before the page is drawn, so that a chosen theme does not flash.
"use strict";
{
  const THEMES = ["auto", "light", "dark"];
  const root = document.documentElement;
  let theme = "auto";
  try {
    theme = localStorage.getItem("sedd-theme") || "auto";
  } catch {
    // storage may be forbidden; the system's theme is used
  }
  const apply = (name) => {
    theme = THEMES.includes(name) ? name : "auto";
    root.dataset.theme = theme;
  };
  apply(theme);
  window.seddTheme = {
    get name() {
      return theme;
    },
    next() {
      apply(THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length]);
      try {
        localStorage.setItem("sedd-theme", theme);
      } catch {
        // as above
      }
      return theme;
    },
  };
}
