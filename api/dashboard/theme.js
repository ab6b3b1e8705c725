// Light or dark: as the system says until the reader says otherwise.

const KEY = "pageframe-theme";
const system = window.matchMedia("(prefers-color-scheme: dark)");

/** Where storage is forbidden the choice lasts as long as the page. */
function stored() {
  try {
    return localStorage.getItem(KEY);
  } catch {
    return null;
  }
}

function store(theme) {
  try {
    localStorage.setItem(KEY, theme);
  } catch {
    // as above
  }
}

/** Puts the theme in force and keeps the button; `onChange` is called after every change, and once now. */
export function startTheme(button, onChange) {
  let chosen = stored();
  const apply = () => {
    const theme = chosen === "light" || chosen === "dark" ? chosen : system.matches ? "dark" : "light";
    document.documentElement.dataset.theme = theme;
    const other = theme === "dark" ? "light" : "dark";
    button.textContent = other === "dark" ? "Dark" : "Light";
    button.setAttribute("aria-label", `${button.textContent} theme`);
    onChange();
  };
  button.addEventListener("click", () => {
    chosen = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
    store(chosen);
    apply();
  });
  system.addEventListener("change", apply);
  // Pixels of the screen a cell has change when the window moves to another one, or is zoomed.
  window.addEventListener("resize", onChange);
  apply();
}
