// Two helps for readers with scripts: a search over headings and words, and the place in the
// contents. Nothing is loaded, and without this file every page is complete. INDEX, in front of
// this line in the built file, is a list of [what, where, on which page, what it says].
"use strict";
(() => {
    const plain = text => text.normalize("NFKD").replace(/\p{M}/gu, "").toLowerCase();
    const words = text => plain(text).split(/[^\p{L}\p{N}]+/u).filter(Boolean);
    const entries = INDEX.map(([what, where, page, says]) => ({
        what, where, page, says, own: words(what), other: words(says), around: words(page),
    }));

    // How well an entry fits: every word asked for has to begin one of its words, and not all of
    // them may be words of its page's title alone.
    function fit(entry, asked) {
        let sum = 0;
        for (const word of asked) {
            if (entry.own.includes(word)) sum += 8;
            else if (entry.own.some(own => own.startsWith(word))) sum += 5;
            else if (entry.other.includes(word)) sum += 2;
            else if (entry.other.some(other => other.startsWith(word))) sum += 1;
            else if (!entry.around.some(other => other.startsWith(word))) return 0;
        }
        return sum && sum + 1 / (1 + entry.own.length); // of two, the shorter one
    }

    function find(text) {
        const asked = words(text);
        return entries.map(entry => [fit(entry, asked), entry]).filter(([sum]) => sum > 0)
            .sort((a, b) => b[0] - a[0]).slice(0, 12).map(([, entry]) => entry);
    }

    function make(name, attributes, text = "") {
        const element = document.createElement(name);
        for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
        element.textContent = text;
        return element;
    }

    const field = make("input", {
        type: "search", placeholder: "Search", "aria-label": "Search the course",
        autocomplete: "off",
    });
    const list = make("ul", {"aria-label": "Results"});
    const said = make("p", {class: "said", role: "status"});

    function show() {
        const found = find(field.value);
        list.replaceChildren(...found.map(entry => {
            const link = make("a", {href: entry.where}, entry.what);
            link.append(make("small", {}, entry.says || entry.page));
            const item = make("li", {});
            item.append(link);
            return item;
        }));
        list.hidden = !found.length;
        const many = found.length === 1 ? "1 result" : `${found.length} results`;
        said.textContent = field.value.trim() && many;
    }

    const place = document.querySelector(".search");
    place.append(field, list, said);
    place.hidden = false;
    show();
    field.addEventListener("input", show);
    field.addEventListener("focus", show);
    list.addEventListener("click", () => { list.hidden = true; });
    place.addEventListener("focusout", () => setTimeout(() => { // a click comes first
        if (!place.matches(":focus-within")) list.hidden = true;
    }, 200));
    place.addEventListener("keydown", event => {
        if (event.key === "Escape") list.hidden = true;
        if (event.key === "Enter" && event.target === field) list.querySelector("a")?.click();
    });
    document.addEventListener("keydown", event => {
        const typing = event.target.closest("input, textarea, select, [contenteditable]");
        if (event.key !== "/" || typing || event.ctrlKey || event.metaKey || event.altKey) return;
        event.preventDefault();
        field.focus();
    });

    // The section being read, in the column of contents.
    const column = document.querySelector(".contents.column");
    const links = column ? [...column.querySelectorAll("a")] : [];
    const heads = links.map(link => document.getElementById(link.hash.slice(1)));
    let current = null;

    function mark() {
        const end = innerHeight + scrollY >= document.documentElement.scrollHeight - 2;
        const line = end ? innerHeight : 120;
        const passed = heads.filter(head => head.getBoundingClientRect().top < line);
        const link = links[passed.length - 1];
        if (link === current) return;
        current?.removeAttribute("aria-current");
        link?.setAttribute("aria-current", "true");
        if (link) column.scrollTop = link.offsetTop - column.clientHeight / 2;
        current = link;
    }

    addEventListener("scroll", mark, {passive: true});
    mark();
})();
