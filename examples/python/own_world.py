"""A world of your own in one file: `environment.kind: own_world:Counter`, started in this folder.

A click on the left half of the screen counts up, one on the right half counts down; the policy says when it is done.
"""

from dart.worlds import Action, Click, Observation, SyncEnv, Task, Verdict, from_pixels


class Counter(SyncEnv):
    def reset(self, task: Task) -> Observation:
        self.goal, self.count = 1 + task.seed % 5, 0
        return self.look(f"Click on the left half of the screen {self.goal} times, then finish.")

    def act(self, action: Action) -> Observation:
        if isinstance(action, Click) and action.at is not None:
            self.count += 1 if action.at.x < 0.5 else -1
        return self.look()

    def judge(self, last: Action, at_limit: bool) -> Verdict:
        return Verdict(float(self.count == self.goal), {"count": self.count, "goal": self.goal})

    def look(self, instruction: str = "") -> Observation:
        """A bar as long as the count."""
        width, height = self.screen
        lit = max(0, min(width, width * self.count // 6))
        row = b"\xff\xcc\x00" * lit + b"\x20\x20\x20" * (width - lit)
        return Observation(from_pixels(row * height, width, height), instruction)
