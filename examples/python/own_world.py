"""A world of your own in one file: `environment.kind: own_world:Boxes`, started in this folder.

Four coloured boxes, one of which the instruction names; a click on a box ends the episode.
"""

import random

from dart.worlds import Action, Click, Observation, SyncEnv, Task, Verdict, from_pixels

COLOURS = {"red": b"\xff\0\0", "blue": b"\0\0\xff", "lime": b"\0\xff\0", "black": b"\0\0\0", "purple": b"\x80\0\x80"}
PLACES = [(0.14, 0.34), (0.54, 0.34), (0.14, 0.62), (0.54, 0.62)]  # of the boxes' corners, as shares of the screen
WIDE, HIGH = 0.32, 0.23


class Boxes(SyncEnv):
    def reset(self, task: Task) -> Observation:
        chance = random.Random(task.seed)
        self.boxes, self.clicked = chance.sample(sorted(COLOURS), 4), ""
        self.wanted = chance.choice(self.boxes)
        return self.look(f"Click on the {self.wanted} colored box.")

    def act(self, action: Action) -> Observation:
        if isinstance(action, Click) and action.at is not None:
            for name, (left, top) in zip(self.boxes, PLACES, strict=True):
                if left <= action.at.x < left + WIDE and top <= action.at.y < top + HIGH:
                    self.clicked = name
        return self.look(done=self.clicked != "")

    def judge(self, last: Action, at_limit: bool) -> Verdict:
        return Verdict(float(self.clicked == self.wanted), {"clicked": self.clicked, "wanted": self.wanted})

    def look(self, instruction: str = "", done: bool = False) -> Observation:
        width, height = self.screen
        picture = bytearray(b"\xff" * 3 * width * height)
        for name, (x, y) in zip(self.boxes, PLACES, strict=True):
            left, right = int(width * x), int(width * (x + WIDE))
            for row in range(int(height * y), int(height * (y + HIGH))):
                picture[3 * (row * width + left) : 3 * (row * width + right)] = COLOURS[name] * (right - left)
        return Observation(from_pixels(bytes(picture), width, height), instruction, done)
