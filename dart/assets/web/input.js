// What the driver has to know or do in a document while it sends input. Runs in an isolated world of each document,
// before the document's own scripts.
(() => {
  // The list of a select and the picker of a date are windows of their own, which no screenshot shows: they are closed
  // as soon as they open, and the keyboard operates both controls. Taking an element out of the layout for a moment
  // closes its popup and changes nothing else.
  const close = root => {
    for (const element of root.querySelectorAll(':is(select, input):open')) {
      const display = element.style.getPropertyValue('display'), priority = element.style.getPropertyPriority('display');
      element.style.setProperty('display', 'none', 'important');
      element.offsetHeight;
      element.style.setProperty('display', display, priority);
    }
  };
  for (const kind of ['mouseup', 'keyup']) {
    addEventListener(kind, event => {
      const root = event.composedPath()[0].getRootNode?.();
      if (!root?.querySelectorAll) return;
      close(root);
      setTimeout(close, 0, root);  // one that the page itself opens now
    }, true);
  }
  // A drag and drop begins after this event, unless somebody cancels it.
  addEventListener('dragstart', event => {
    dartDrags('perhaps');
    setTimeout(() => dartDrags(event.defaultPrevented ? '' : 'yes'));
  }, true);
})()
