// Helps for readers with scripts: a search, light or dark, copying, a field for each guess, figures
// that open, and the place in the contents. Nothing is loaded, and without this file every page is
// complete. INDEX, in front of this line in the built file, is a list of [file, entries], and an
// entry is [anchor, heading or word, what it says, ...paragraphs and rows of tables below it].
"use strict";
(() => {
    const all = (selector, inside = document) => [...inside.querySelectorAll(selector)];
    const plain = text => text.normalize("NFKD").replace(/\p{M}/gu, "").toLowerCase();
    const words = text => plain(text).split(/[^\p{L}\p{N}]+/u).filter(Boolean);

    function make(name, attributes, ...inside) {
        const element = document.createElement(name);
        for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
        element.append(...inside);
        return element;
    }

    // What the browser keeps, if it may.
    const recall = key => { try { return localStorage.getItem(key); } catch { return null; } };
    const remember = (key, value) => { try { localStorage.setItem(key, value); } catch {} };

    // What can be found: each heading or word, and each of the texts below a heading.
    const read = () => INDEX.flatMap(([file, of]) => of.flatMap(([key, what, says, ...texts]) => {
        const page = of[0][1], where = key ? `${file}#${key}` : file;
        const entry = {what, page, where, around: words(page)};
        return [{...entry, says, own: words(what), other: words(says)},
            ...texts.map(text => ({...entry, text, own: [], other: words(text)}))];
    }));
    let known = null;

    // How well an entry fits: every word asked for has to begin one of its words, and not all of
    // them may be words of its page's title alone. A heading or a word goes before any text.
    function fit({own, other, around, text}, asked) {
        const points = (words, word, whole, part) => words.includes(word) ? whole
            : words.some(long => long.startsWith(word)) ? part : 0;
        let sum = 0;
        for (const word of asked) {
            const most = points(own, word, 8, 5) || points(other, word, 2, 1);
            if (!most && !points(around, word, 1, 1)) return 0;
            sum += most;
        }
        if (!sum || text) return sum;
        const row = own.join(" ").includes(asked.join(" ")); // of two, the one with them in a row
        return sum + row + 1 / (1 + own.length); // and the shorter one
    }

    // The twelve that fit best, of a page's texts the best two.
    function find(asked) {
        const texts = {};
        known ||= read();
        return known.map(entry => [fit(entry, asked), entry]).filter(([sum]) => sum > 0)
            .sort((a, b) => b[0] - a[0]).map(([, entry]) => entry)
            .filter(({text, page}) => !text || (texts[page] = (texts[page] || 0) + 1) < 3)
            .slice(0, 12);
    }

    // What is said of an entry: of a text the piece around the first word asked for.
    function piece({says, page, text}, word) {
        if (!text) return says || page;
        const at = Math.max(0, plain(text).indexOf(word) - 50), end = at + 150;
        return `${page}: ${at ? "…" : ""}${text.slice(at, end)}${end < text.length ? "…" : ""}`;
    }

    const field = make("input", {type: "search", placeholder: "Search", autocomplete: "off"});
    field.ariaLabel = "Search the course";
    const list = make("ul", {"aria-label": "Results"});
    const said = make("p", {class: "said", role: "status"});

    function show() {
        const asked = words(field.value), found = find(asked);
        list.replaceChildren(...found.map(entry => make("li", {}, make("a", {href: entry.where},
            entry.what, make("small", {}, piece(entry, asked[0]))))));
        list.hidden = !found.length;
        const many = found.length === 1 ? "1 result" : `${found.length} results`;
        said.textContent = field.value.trim() && many;
        said.classList.toggle("none", Boolean(field.value.trim()) && !found.length);
    }

    const place = make("div", {class: "search", role: "search"}, field, list, said);
    const shut = () => { list.hidden = true; };
    shut();
    for (const event of ["input", "focus"]) field.addEventListener(event, show);
    list.addEventListener("click", shut);
    place.addEventListener("focusout", () => setTimeout(() => { // a click comes first
        if (!place.matches(":focus-within")) shut();
    }, 200));
    place.addEventListener("keydown", event => {
        if (event.key === "Escape") shut();
        if (event.key === "Enter" && event.target === field) list.querySelector("a")?.click();
    });
    document.addEventListener("keydown", event => {
        const typing = event.target.closest("input, textarea, select, [contenteditable]");
        if (event.key !== "/" || typing || event.ctrlKey || event.metaKey || event.altKey) return;
        event.preventDefault();
        field.focus();
    });

    // Light, dark, or as the system has it; the head of each page reads it again.
    const root = document.documentElement;
    const theme = make("select", {"aria-label": "Colors"}, ...["auto", "light", "dark"].map(
        name => make("option", {value: name}, `◐ ${name}`)));
    theme.value = root.dataset.theme || "auto";
    theme.addEventListener("change", () => {
        root.dataset.theme = theme.value;
        remember("theme", theme.value);
    });
    document.querySelector(".bar > div").append(place, theme);

    // A number for each guess. The first one counts, and then stands beside what came out.
    for (const asking of all(".guess")) {
        const key = `guess ${asking.dataset.key}`, word = asking.querySelector("b").textContent;
        const about = {type: "number", step: "any", required: "", "aria-label": `Guess: ${word}`};
        const number = make("input", about);
        const form = make("form", {}, number, make("button", {}, "That's my guess"));
        function tell(value) {
            asking.textContent = `${word}: your guess is ${value}.`;
            for (const out of all(".predict pre")) out.textContent = out.textContent.replace(
                `${word}: it `, `${word}: you guessed ${value}, and it `);
        }
        form.addEventListener("submit", event => {
            event.preventDefault();
            if (recall(key) === null) remember(key, Number(number.value));
            tell(recall(key) ?? Number(number.value));
        });
        if (recall(key) === null) asking.append(form);
        else tell(recall(key));
    }

    // Code can be copied.
    for (const code of all(".highlight > pre:has([class])")) {
        const button = make("button", {}, "Copy");
        button.addEventListener("click", async () => {
            await navigator.clipboard.writeText(code.textContent.trimEnd() + "\n");
            button.textContent = "Copied";
            setTimeout(() => { button.textContent = "Copy"; }, 1500);
        });
        code.after(button);
    }

    // A figure opens as wide as the window, on a telephone wider.
    const large = make("dialog", {"aria-label": "Figure"});
    large.addEventListener("click", () => large.close());
    for (const picture of all("article img:not(.card img, a img)")) {
        Object.assign(picture, {role: "button", tabIndex: 0, title: "Enlarge"});
        picture.addEventListener("click", () => {
            const copy = make("img", {src: picture.src, alt: picture.alt});
            large.replaceChildren(make("button", {}, "Close"), copy);
            document.body.append(large);
            large.showModal();
        });
        picture.addEventListener("keydown", event => {
            if (event.key !== "Enter") return;
            event.preventDefault(); // or it would press "Close", too
            picture.click();
        });
    }

    // The section being read, in the column of contents.
    const column = document.querySelector(".contents.column");
    const links = column ? all("a[href^='#']", column) : [];
    const heads = links.map(link => document.getElementById(link.hash.slice(1)));
    let current = null;

    function mark() {
        const end = innerHeight + scrollY >= root.scrollHeight - 2;
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
