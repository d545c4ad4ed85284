"""`amplab lab` as a person meets it: the lab opens by itself, survives a reload, and is in view after Run All."""

import os
import signal
from collections.abc import Iterator

import pytest
from dashboard_page import DashboardPage
from lab_page import NOTEBOOKS, LabPage, sound_page
from lab_server import LabServer, running_amplab_lab
from playwright.sync_api import Browser, expect

LESSON = "/doc/tree/00_the_lab.ipynb"
IN_VIEW = """dashboard => {
  const { top, bottom } = dashboard.getBoundingClientRect();
  return Math.min(bottom, innerHeight) - Math.max(top, 0) > innerHeight / 2;
}"""
STEP_OF_THE_KERNEL = "print(len(amplab.lab.active().history))"


COLORED = """async (picture, ground) => {
  await picture.decode();
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [picture.naturalWidth, picture.naturalHeight];
  const pen = canvas.getContext("2d");
  pen.fillStyle = `rgb(${ground}, ${ground}, ${ground})`;
  pen.fillRect(0, 0, canvas.width, canvas.height);
  pen.drawImage(picture, 0, 0);
  const { data } = pen.getImageData(0, 0, canvas.width, canvas.height);
  let colored = 0;
  let strong = 0;
  for (let at = 0; at < data.length; at += 4) {
    const [red, green, blue] = data.subarray(at, at + 3);
    const isColored = Math.max(red, green, blue) - Math.min(red, green, blue) > 24;
    colored += isColored;
    strong += !isColored && Math.abs(red - ground) > 135;
  }
  return [colored, strong].map((count) => (4 * count) / data.length);
}"""
WATCH_PICTURE = """const look = () => {
  const picture = document.querySelector(".jp-RenderedImage img");
  window.hadPicture ||= Boolean(picture);
  window.sawPicture ||= Boolean(picture?.checkVisibility({ visibilityProperty: true }));
  requestAnimationFrame(look);
};
look();"""
PID = "import os; print(os.getpid())"


@pytest.fixture(scope="module")
def lessons(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LabServer]:
    """What `amplab lab` starts."""
    with running_amplab_lab(tmp_path_factory.mktemp("amplab_lab")) as server:
        yield server


@pytest.fixture
def lesson(lessons: LabServer, browser: Browser) -> Iterator[LabPage]:
    """A page on which nothing has been pressed."""
    with sound_page(lessons, browser) as page:
        yield page


def test_the_lab_opens_by_itself_and_the_run_survives_run_all_a_reload_and_the_kernels_death(lesson: LabPage) -> None:
    lesson.page.add_init_script(WATCH_PICTURE)
    lesson.page.goto(lesson.server.url(LESSON))
    lesson.page.locator(".amp-dashboard").wait_for(timeout=90_000)  # a cold start, on a busy machine
    assert lesson.page.evaluate("[hadPicture, sawPicture]") == [True, False], "the picture says: press Shift+Enter"
    dashboard = DashboardPage(lesson)
    lesson.wait_until_idle()
    lesson.run_all()
    lesson.page.wait_for_function(IN_VIEW, arg=dashboard.root.element_handle())
    dashboard = DashboardPage(lesson)
    dashboard.press("Start")
    dashboard.wait_for_step(60)
    lesson.save()
    lesson.reload()
    again = DashboardPage(lesson)
    again.wait_for_step(61)  # the same run, which went on
    again.wait_for_state("running")
    again.press("Pause")
    again.wait_for_state("paused")
    expect(again.root.locator(".amp-notice")).to_have_count(0)
    lesson.wait_until_idle()
    last_step = int(lesson.execute(STEP_OF_THE_KERNEL))
    again.wait_for_step(last_step)
    assert again.step == last_step
    assert (NOTEBOOKS / "00_the_lab.ipynb").read_bytes() != (lesson.server.root / "00_the_lab.ipynb").read_bytes()
    kill_the_kernel_and_continue(lesson, again)


def kill_the_kernel_and_continue(lesson: LabPage, dashboard: DashboardPage) -> None:
    """Kill the kernel as the system does where memory is short; open the lab again and continue the run."""
    step, scale = dashboard.step, dashboard.figure("scale")
    os.kill(int(lesson.execute(PID)), signal.SIGKILL)
    lesson.page.locator(".jp-Dialog").get_by_role("button", name="Ok").click()  # JupyterLab says that it has died
    said = dashboard.root.get_by_role("alert").filter(has_text="The kernel has restarted")
    expect(said).to_contain_text("press Shift+Enter")
    said.click()
    lesson.page.keyboard.press("Shift+Enter")
    expect(said).to_have_count(0)
    dashboard = DashboardPage(lesson)
    offer = dashboard.root.get_by_role("status").filter(has_text="Continue the run of")
    expect(offer).to_contain_text(f"at step {step:,}?")
    assert dashboard.step == 0
    offer.get_by_role("button", name="Continue it").click()
    dashboard.wait_for_step(step)
    expect(offer).to_have_count(0)
    assert (dashboard.step, dashboard.figure("scale")) == (step, scale)
    dashboard.press("Step")
    dashboard.wait_for_step(step + 1)


def test_elsewhere_the_picture_says_what_to_press_and_a_reload_too(page: LabPage) -> None:
    """In any other Jupyter: no extension, no signature."""
    page.open(NOTEBOOKS / "00_the_lab.ipynb")
    picture = page.page.locator(".jp-RenderedImage img")
    for ground in (255, 17):  # the light and the dark theme
        colored, strong = picture.evaluate(COLORED, ground)
        assert 0.02 < colored < 0.1  # the instruction alone
        assert strong < 0.02  # where the live page has text, charts and buttons
    picture.click()
    page.page.keyboard.press("Shift+Enter")
    dashboard = DashboardPage(page)
    dashboard.press("Start")
    dashboard.wait_for_step(60)
    page.save()
    page.reload()
    said = page.page.locator(".jp-OutputArea-output", has_text="The lab was open here.")
    expect(said).to_contain_text("press Shift+Enter")
    page.wait_until_idle()
    said.click()
    page.page.keyboard.press("Shift+Enter")
    again = DashboardPage(page)
    again.wait_for_step(61)
    again.root.get_by_role("button", name="Continue with it").click()
    expect(again.root.locator(".amp-notice")).to_have_count(0)
    assert again.step >= 61


def test_the_app_shows_the_lesson_and_the_lab_without_sources(
    browser: Browser, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with running_amplab_lab(tmp_path_factory.mktemp("app"), "--app") as server, sound_page(server, browser) as page:
        page.page.goto(server.url(LESSON))
        expect(page.page.locator(".jp-RenderedHTMLCommon h1").first).to_contain_text("The lab")
        page.page.locator(".amp-dashboard").wait_for(timeout=90_000)
        expect(page.page.locator(".jp-CodeCell .jp-Cell-inputWrapper").locator("visible=true")).to_have_count(0)
        expect(page.page.locator(".jp-MarkdownCell").first).to_be_visible()


def test_a_folder_with_python_modules_runs_nothing_by_itself(
    browser: Browser, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("planted")
    (folder / "lessons").mkdir()
    ran = folder / "ran"
    for name in ("torch", "IPython", "ipykernel_launcher", "json", "triton"):
        (folder / "lessons" / f"{name}.py").write_text(f"open({str(ran)!r}, 'a').write('{name} ')\nraise ImportError\n")
    with running_amplab_lab(folder) as server, sound_page(server, browser) as page:
        page.page.goto(server.url(LESSON))
        expect(page.page.locator(".amplab-not-opened")).to_contain_text("IPython, ipykernel_launcher", timeout=90_000)
        page.wait_until_idle()
        assert not ran.exists()
        expect(page.page.locator(".amp-dashboard")).to_have_count(0)
        page.run_all()
        page.page.locator(".amp-dashboard").wait_for(timeout=90_000)
        expect(page.page.locator(".amplab-not-opened")).to_have_count(0)
        found = ran.read_text().split() if ran.exists() else []
        assert not {"torch", "IPython", "ipykernel_launcher", "json"} & set(found), (
            "they hide nothing that is installed"
        )
