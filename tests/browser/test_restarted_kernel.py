"""A page whose kernel was restarted from another page says so; one whose kernel is busy does not."""

from dashboard_page import DashboardPage
from lab_page import LabPage
from playwright.sync_api import expect

RESTART = "() => window.jupyterapp.shell.currentWidget.sessionContext.session.kernel.restart()"
GONE = "The kernel has restarted"
ASKED = """() => {
  window.commInfos = 0;
  const kernel = window.jupyterapp.shell.currentWidget.sessionContext.session.kernel;
  const ask = kernel.requestCommInfo.bind(kernel);
  kernel.requestCommInfo = (content) => ask(content).then((reply) => { window.commInfos += 1; return reply; });
}"""


def test_a_kernel_that_another_page_has_restarted_is_missed_and_a_busy_one_is_not(lab: LabPage) -> None:
    dashboard = DashboardPage(lab)
    lab.page.evaluate(ASKED)
    busy = lab.page.evaluate_handle("""() => {
      const kernel = window.jupyterapp.shell.currentWidget.sessionContext.session.kernel;
      return { done: kernel.requestExecute({ code: "import time; time.sleep(8)" }).done };
    }""")
    dashboard.press("Step")
    busy.evaluate("({ done }) => done.then(() => null)")
    dashboard.wait_for_step(1)
    lab.page.wait_for_function("window.commInfos > 0")
    said = dashboard.root.get_by_role("alert").filter(has_text=GONE)
    expect(said).to_have_count(0)

    other = lab.page.context.new_page()
    other.goto(lab.page.url)
    other.wait_for_function("() => window.jupyterapp?.shell.currentWidget?.sessionContext?.session?.kernel")
    other.evaluate(RESTART)
    other.close()
    lab.page.bring_to_front()
    dashboard.press("Step")
    expect(said).to_contain_text("press Shift+Enter")
    assert dashboard.root.evaluate("root => [...root.querySelectorAll('.amplab')].every((part) => part.inert)")
