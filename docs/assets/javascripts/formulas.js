// Renders what pymdownx.arithmatex (generic) marks up: \( ... \) inline and \[ ... \] displayed.
(function () {
  function render() {
    document.querySelectorAll(".arithmatex").forEach(function (node) {
      const text = node.textContent.trim();
      const display = text.startsWith("\\[");
      katex.render(text.slice(2, -2), node, { displayMode: display, throwOnError: false });
    });
  }
  if (document.readyState === "loading") {
    document.addEventListener("DOMContentLoaded", render);
  } else {
    render();
  }
})();
