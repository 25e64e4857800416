// Before anything is painted: light or dark, where it was chosen on this page.
try {
  const theme = localStorage.getItem("dtgpt.theme");
  if (theme) document.documentElement.dataset.theme = theme;
} catch {
  // a browser that keeps nothing
}
