// Light or dark theme: the system's preference, or the button's choice. A classic script, so that the
// first paint already has the right colours.
(() => {
  const STORE = "moe-serve-theme";
  const CHOICES = ["auto", "light", "dark"];
  const system = window.matchMedia("(prefers-color-scheme: dark)");

  function choice() {
    try {
      const stored = localStorage.getItem(STORE);
      return CHOICES.includes(stored) ? stored : "auto";
    } catch {
      return "auto"; // storage is disabled
    }
  }

  function apply() {
    const chosen = choice();
    const isDark = chosen === "dark" || (chosen === "auto" && system.matches);
    document.documentElement.dataset.theme = isDark ? "dark" : "light";
    const button = document.getElementById("theme");
    if (button) button.textContent = `Theme: ${chosen}`;
    document.dispatchEvent(new CustomEvent("themechange"));
  }

  function next() {
    const following = CHOICES[(CHOICES.indexOf(choice()) + 1) % CHOICES.length];
    try {
      localStorage.setItem(STORE, following);
    } catch {
      return;
    }
    apply();
  }

  system.addEventListener("change", apply);
  document.addEventListener("DOMContentLoaded", () => {
    document.getElementById("theme")?.addEventListener("click", next);
    apply();
  });
  apply();
})();
