BEGIN TRANSACTION;
CREATE TABLE checkpoints (
	run_id TEXT NOT NULL, 
	path TEXT NOT NULL, 
	version BIGINT NOT NULL, 
	created DOUBLE NOT NULL, 
	success_rate DOUBLE, 
	kept BOOLEAN NOT NULL, 
	PRIMARY KEY (run_id, path), 
	FOREIGN KEY(run_id) REFERENCES runs (id)
);
INSERT INTO "checkpoints" VALUES('old-run','/elsewhere/checkpoints/v000001',1,5.0,0.5,1);
CREATE TABLE dart_schema (
	version INTEGER NOT NULL, 
	PRIMARY KEY (version)
);
INSERT INTO "dart_schema" VALUES(2);
CREATE TABLE events (
	run_id TEXT NOT NULL, 
	sequence BIGINT NOT NULL, 
	unix_seconds DOUBLE NOT NULL, 
	kind TEXT NOT NULL, 
	json TEXT NOT NULL, 
	PRIMARY KEY (run_id, sequence), 
	FOREIGN KEY(run_id) REFERENCES runs (id)
);
INSERT INTO "events" VALUES('old-run',1,1.0,'phase','{"phase": "training"}');
CREATE TABLE groups (
	id TEXT NOT NULL, 
	run_id TEXT NOT NULL, 
	kind TEXT NOT NULL, 
	suite TEXT NOT NULL, 
	task_name TEXT NOT NULL, 
	seed BIGINT NOT NULL, 
	planned INTEGER NOT NULL, 
	"plan" TEXT NOT NULL, 
	state TEXT NOT NULL, 
	fate TEXT NOT NULL, 
	opened DOUBLE NOT NULL, 
	closed DOUBLE, 
	consumed_by_update BIGINT, 
	PRIMARY KEY (id), 
	FOREIGN KEY(run_id, suite, task_name) REFERENCES tasks (run_id, suite, name)
);
INSERT INTO "groups" VALUES('g000001','old-run','training','miniwob','click-color',17,2,'all 2','consumed','trained',1.0,3.0,1);
INSERT INTO "groups" VALUES('g000002','old-run','training','miniwob','click-color',17,2,'all 2','released','they differ',1.0,3.0,NULL);
INSERT INTO "groups" VALUES('g000003','old-run','training','miniwob','click-color',17,2,'all 2','open','pending',1.0,NULL,NULL);
CREATE TABLE runs (
	id TEXT NOT NULL, 
	name TEXT NOT NULL, 
	kind TEXT NOT NULL, 
	config_json TEXT NOT NULL, 
	state TEXT NOT NULL, 
	started DOUBLE NOT NULL, 
	finished DOUBLE, 
	summary_json TEXT, 
	control_address TEXT, 
	PRIMARY KEY (id)
);
INSERT INTO "runs" VALUES('old-run','old','training','{"agent": {}}','running',1.0,NULL,NULL,NULL);
CREATE TABLE steps (
	trajectory_id TEXT NOT NULL, 
	"index" INTEGER NOT NULL, 
	text TEXT NOT NULL, 
	action_json TEXT, 
	parse_error TEXT NOT NULL, 
	truncated BOOLEAN NOT NULL, 
	prompt_token_ids BLOB NOT NULL, 
	token_ids BLOB NOT NULL, 
	logprobs BLOB NOT NULL, 
	mean_logprob DOUBLE, 
	versions_json TEXT NOT NULL, 
	images_json TEXT NOT NULL, 
	PRIMARY KEY (trajectory_id, "index"), 
	FOREIGN KEY(trajectory_id) REFERENCES trajectories (id)
);
INSERT INTO "steps" VALUES('g000001-0',0,'click(1, 2)','{"kind": "click", "at": {"x": 0.25, "y": 0.5}, "button": "left", "count": 1, "modifiers": []}','',0,X'010000000200000067500200',X'0700000008000000',X'000000BF000080BE',-0.375,'[[3, 0, 2]]','[["9e506dafee9b05309266cfffce91130882172e277ac28f6e958ddb66054657d6", "image/png", 160, 210]]');
INSERT INTO "steps" VALUES('g000001-0',1,'click(1, 2)','{"kind": "click", "at": {"x": 0.25, "y": 0.5}, "button": "left", "count": 1, "modifiers": []}','',0,X'010000000200000067500200',X'0700000008000000',X'000000BF000080BE',-0.375,'[[3, 0, 2]]','[["9e506dafee9b05309266cfffce91130882172e277ac28f6e958ddb66054657d6", "image/png", 160, 210], ["c9458ba055669c222194b70e0f20a22936c8bee23f571bf8019c366e97135e6d", "image/png", 160, 210]]');
INSERT INTO "steps" VALUES('g000001-1',0,'click(1, 2)','{"kind": "click", "at": {"x": 0.25, "y": 0.5}, "button": "left", "count": 1, "modifiers": []}','',0,X'010000000200000067500200',X'0700000008000000',X'000000BF000080BE',-0.375,'[[3, 0, 2]]','[["b8ddbebcd7b740078984d2d8bdb868bed621721c1830919329eb4cb973494eea", "image/png", 160, 210]]');
INSERT INTO "steps" VALUES('g000001-1',1,'click(1, 2)','{"kind": "click", "at": {"x": 0.25, "y": 0.5}, "button": "left", "count": 1, "modifiers": []}','',0,X'010000000200000067500200',X'0700000008000000',X'000000BF000080BE',-0.375,'[[3, 0, 2]]','[["b8ddbebcd7b740078984d2d8bdb868bed621721c1830919329eb4cb973494eea", "image/png", 160, 210], ["ec0b1c8f63dfee5cf67cfd2f4ccc5e977b4d067ef5acd6949753a29c913c6b00", "image/png", 160, 210]]');
INSERT INTO "steps" VALUES('g000002-0',0,'click(1, 2)','{"kind": "click", "at": {"x": 0.25, "y": 0.5}, "button": "left", "count": 1, "modifiers": []}','',0,X'010000000200000067500200',X'0700000008000000',X'000000BF000080BE',-0.375,'[[3, 0, 2]]','[["e0e0124880c0f5f99ee3277c095f0e6907716820571b0ff0b176733661e21f8f", "image/png", 160, 210]]');
INSERT INTO "steps" VALUES('g000002-0',1,'click(1, 2)','{"kind": "click", "at": {"x": 0.25, "y": 0.5}, "button": "left", "count": 1, "modifiers": []}','',0,X'010000000200000067500200',X'0700000008000000',X'000000BF000080BE',-0.375,'[[3, 0, 2]]','[["e0e0124880c0f5f99ee3277c095f0e6907716820571b0ff0b176733661e21f8f", "image/png", 160, 210], ["e2d44843bc68a7b7c82ee726eb3d06759a04f8ab6c22f3e3ec8f07e03f421cee", "image/png", 160, 210]]');
INSERT INTO "steps" VALUES('g000002-1',0,'click(1, 2)','{"kind": "click", "at": {"x": 0.25, "y": 0.5}, "button": "left", "count": 1, "modifiers": []}','',0,X'010000000200000067500200',X'0700000008000000',X'000000BF000080BE',-0.375,'[[3, 0, 2]]','[["672cf3a0be10faf109d3ed871e5831798eb1f589376266386e6732faf370da73", "image/png", 160, 210]]');
INSERT INTO "steps" VALUES('g000002-1',1,'click(1, 2)','{"kind": "click", "at": {"x": 0.25, "y": 0.5}, "button": "left", "count": 1, "modifiers": []}','',0,X'010000000200000067500200',X'0700000008000000',X'000000BF000080BE',-0.375,'[[3, 0, 2]]','[["672cf3a0be10faf109d3ed871e5831798eb1f589376266386e6732faf370da73", "image/png", 160, 210], ["157f8f3b93a955081b597ffef88a9df6f59d9428c3b483b43a7d3d4b54dfd839", "image/png", 160, 210]]');
INSERT INTO "steps" VALUES('g000003-0',0,'click(1, 2)','{"kind": "click", "at": {"x": 0.25, "y": 0.5}, "button": "left", "count": 1, "modifiers": []}','',0,X'010000000200000067500200',X'0700000008000000',X'000000BF000080BE',-0.375,'[[3, 0, 2]]','[["c5d5ca8bd4ecc5f0ab3f7b32f8f5bd4e5b8b74b47f50c399d92be6a68895eea4", "image/png", 160, 210]]');
INSERT INTO "steps" VALUES('g000003-0',1,'click(1, 2)','{"kind": "click", "at": {"x": 0.25, "y": 0.5}, "button": "left", "count": 1, "modifiers": []}','',0,X'010000000200000067500200',X'0700000008000000',X'000000BF000080BE',-0.375,'[[3, 0, 2]]','[["c5d5ca8bd4ecc5f0ab3f7b32f8f5bd4e5b8b74b47f50c399d92be6a68895eea4", "image/png", 160, 210], ["d0e7396d6a680c9ad6440c8497169264dd2ef802ac218b64246523f9d22a73e3", "image/png", 160, 210]]');
CREATE TABLE syncs (
	id INTEGER NOT NULL, 
	run_id TEXT NOT NULL, 
	version BIGINT NOT NULL, 
	replica TEXT NOT NULL, 
	started DOUBLE NOT NULL, 
	finished DOUBLE NOT NULL, 
	pause_seconds DOUBLE NOT NULL, 
	bytes BIGINT NOT NULL, 
	PRIMARY KEY (id), 
	FOREIGN KEY(run_id) REFERENCES runs (id)
);
CREATE TABLE tasks (
	run_id TEXT NOT NULL, 
	suite TEXT NOT NULL, 
	name TEXT NOT NULL, 
	PRIMARY KEY (run_id, suite, name), 
	FOREIGN KEY(run_id) REFERENCES runs (id)
);
INSERT INTO "tasks" VALUES('old-run','miniwob','click-color');
CREATE TABLE trajectories (
	id TEXT NOT NULL, 
	run_id TEXT NOT NULL, 
	group_id TEXT NOT NULL, 
	suite TEXT NOT NULL, 
	task_name TEXT NOT NULL, 
	seed BIGINT NOT NULL, 
	attempt INTEGER NOT NULL, 
	instruction TEXT NOT NULL, 
	termination TEXT NOT NULL, 
	reward DOUBLE NOT NULL, 
	success BOOLEAN NOT NULL, 
	step_limit INTEGER NOT NULL, 
	steps INTEGER NOT NULL, 
	oldest_version BIGINT, 
	newest_version BIGINT, 
	advantage DOUBLE, 
	fate TEXT NOT NULL, 
	pooled_from TEXT NOT NULL, 
	started DOUBLE NOT NULL, 
	finished DOUBLE NOT NULL, 
	PRIMARY KEY (id), 
	FOREIGN KEY(run_id) REFERENCES runs (id), 
	FOREIGN KEY(group_id) REFERENCES groups (id)
);
INSERT INTO "trajectories" VALUES('g000001-0','old-run','g000001','miniwob','click-color',17,1,'Click red','environment',1.0,1,10,2,3,3,1.0,'trained','',1.0,2.0);
INSERT INTO "trajectories" VALUES('g000001-1','old-run','g000001','miniwob','click-color',17,1,'Click red','environment',1.0,1,10,2,3,3,-1.0,'trained','',1.0,2.0);
INSERT INTO "trajectories" VALUES('g000002-0','old-run','g000002','miniwob','click-color',17,1,'Click red','environment',1.0,1,10,2,3,3,1.0,'pending','',1.0,3.0);
INSERT INTO "trajectories" VALUES('g000002-1','old-run','g000002','miniwob','click-color',17,1,'Click red','environment',1.0,1,10,2,3,3,-1.0,'pending','',1.0,3.0);
INSERT INTO "trajectories" VALUES('g000003-0','old-run','g000003','miniwob','click-color',17,1,'Click red','environment',1.0,1,10,2,3,3,NULL,'pending','',1.0,4.0);
CREATE TABLE versions (
	run_id TEXT NOT NULL, 
	version BIGINT NOT NULL, 
	"update" BIGINT NOT NULL, 
	created DOUBLE NOT NULL, 
	metrics_json TEXT NOT NULL, 
	PRIMARY KEY (run_id, version), 
	FOREIGN KEY(run_id) REFERENCES runs (id)
);
INSERT INTO "versions" VALUES('old-run',1,1,4.0,'{"loss": 0.5}');
CREATE INDEX syncs_by_version ON syncs (run_id, version);
CREATE INDEX groups_by_state ON groups (run_id, state);
CREATE INDEX trajectories_by_time ON trajectories (run_id, finished, id);
CREATE INDEX trajectories_by_fate ON trajectories (run_id, fate);
CREATE INDEX trajectories_by_task ON trajectories (run_id, task_name, finished, id);
CREATE INDEX trajectories_by_group ON trajectories (group_id);
COMMIT;
