-- claim_1: rules 1, 3, 5 and 6, as in leaselib/_rules.py. Asks for a run, or for its next attempt.
--
-- Arguments: p_takeover_of is the attempt that a backup saw, null for a new run. p_wait_ms: how long to wait for a lock.
-- Answer: [p_token, outcome, this server's clock when it decided, the namespace's epoch, how long to wait for `early`,
-- the slots that this claim ended, the run (see run_1), or the one in the way for `overlap`, or null].
--
-- Locks: a claim that would change nothing takes none. Any other locks the job's row, so that claims of a job take turns
-- and those of two jobs never meet; then the runs that it may write. It waits for a heartbeat, finish or release that is
-- under way on one of them; but not for a transaction that has confirmed the run, nor for more than half a second: such a
-- run is alive, as somebody is at work on it. The clock is read when the last lock is held.

CREATE OR REPLACE FUNCTION {schema}.claim_1(
    p_namespace text, p_job text, p_slot_ms bigint, p_token text, p_runner text, p_lease_ms bigint,
    p_max_attempts bigint, p_overlap text, p_max_late_ms bigint, p_keep_ms bigint, p_history_size bigint,
    p_reason text, p_takeover_of bigint, p_wait_ms bigint
) RETURNS json
LANGUAGE plpgsql VOLATILE SECURITY INVOKER
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
AS $leaselib$
DECLARE
    c_late_tolerance_ms CONSTANT bigint := 10000;
    c_early_ms CONSTANT bigint := 1000;
    c_trim_margin_ms CONSTANT bigint := 60000;
    c_trim_batch CONSTANT bigint := 16;
    c_log_entries CONSTANT integer := 20;
    c_row_wait_ms CONSTANT bigint := 500;
    v_skip CONSTANT boolean := p_overlap = 'skip';
    v_outcome text;
    v_now_ms bigint;
    v_epoch text;
    v_wait_ms bigint := 0;
    v_interrupted bigint[] := '{}';
    v_answer {schema}.runs;            -- the run that the answer carries
    v_setting text;
    v_job_is_new boolean := false;
    v_fence bigint;                    -- what is remembered of the job
    v_floor_ms bigint;
    v_kept bigint;
    v_run {schema}.runs;               -- the run that is asked for
    v_others {schema}.runs[];          -- every other running run of the job, oldest slot first
    v_other {schema}.runs;
    v_live {schema}.runs;              -- the newest of them that is alive
    v_doomed bigint[] := '{}';         -- the dead ones that a start of this run ends
    v_touch bigint[];                  -- slots of the rows that this claim may have to write
    v_tried bigint[] := '{}';          -- those that it tried to lock
    v_locked bigint[] := '{}';         -- those that it locked
    v_slot_ms bigint;
    v_newest_ms bigint;
    v_newer_started boolean;
    v_limit bigint;
    v_dropped bigint[] := '{}';        -- trimmed slots, oldest first
BEGIN
    v_setting := set_config('lock_timeout', p_wait_ms::text, true);
    IF current_setting('synchronous_commit') NOT IN ('on', 'remote_apply') THEN
        v_setting := set_config('synchronous_commit', 'on', true);
    END IF;

    -- Most claims find a run that is over or alive, and change nothing.
    SELECT r.* INTO v_run FROM {schema}.runs r
    WHERE r.namespace = p_namespace AND r.job = p_job AND r.slot_ms = p_slot_ms;
    v_now_ms := floor(extract(epoch FROM clock_timestamp()) * 1000)::bigint;
    v_outcome := CASE
        WHEN v_run.slot_ms IS NULL THEN CASE WHEN p_takeover_of IS NOT NULL THEN 'gone' END
        WHEN v_run.status <> 'running' THEN 'finished'
        WHEN v_run.token <> p_token AND NOT v_run.released AND v_run.lease_end_ms > v_now_ms THEN 'running'
    END;
    IF v_outcome IS NOT NULL THEN
        SELECT n.epoch INTO v_epoch FROM {schema}.namespaces n
        WHERE n.namespace = p_namespace AND NOT EXISTS (
            SELECT FROM {schema}.runs r
            WHERE r.namespace = p_namespace AND r.job = p_job AND r.status = 'running'
                AND NOT r.released AND r.lease_end_ms > v_now_ms + r.lease_ms
        );
        IF FOUND THEN
            RETURN json_build_array(
                p_token, v_outcome, v_now_ms, v_epoch, 0, v_interrupted,
                CASE WHEN v_run.slot_ms IS NOT NULL THEN {schema}.run_1(v_run) END
            );
        END IF;
    END IF;

    LOOP
        SELECT j.fence, j.floor_ms, j.kept, n.epoch INTO v_fence, v_floor_ms, v_kept, v_epoch
        FROM {schema}.jobs j LEFT JOIN {schema}.namespaces n ON n.namespace = p_namespace
        WHERE j.namespace = p_namespace AND j.job = p_job
        FOR NO KEY UPDATE OF j;
        EXIT WHEN FOUND;
        INSERT INTO {schema}.jobs (namespace, job, fence, floor_ms, kept)
        VALUES (p_namespace, p_job, 0, NULL, 0) ON CONFLICT DO NOTHING;
        v_job_is_new := FOUND;
    END LOOP;

    LOOP
        SELECT ARRAY(
            SELECT r FROM {schema}.runs r
            WHERE r.namespace = p_namespace AND r.job = p_job AND r.status = 'running' AND r.slot_ms <> p_slot_ms
            ORDER BY r.slot_ms
        ), (
            SELECT r.slot_ms FROM {schema}.runs r
            WHERE r.namespace = p_namespace AND r.job = p_job
            ORDER BY r.slot_ms DESC LIMIT 1
        ) INTO v_others, v_newest_ms;
        v_run := NULL;
        IF v_newest_ms >= p_slot_ms THEN
            SELECT r.* INTO v_run FROM {schema}.runs r
            WHERE r.namespace = p_namespace AND r.job = p_job AND r.slot_ms = p_slot_ms;
        END IF;
        v_now_ms := floor(extract(epoch FROM clock_timestamp()) * 1000)::bigint;
        EXIT WHEN v_run.slot_ms IS NULL AND v_others = '{}';
        v_touch := '{}';
        FOREACH v_other IN ARRAY v_run || v_others LOOP
            IF v_other.status = 'running' AND (
                v_other.token = p_token OR v_other.released OR v_other.lease_end_ms <= v_now_ms
                OR v_other.lease_end_ms > v_now_ms + v_other.lease_ms
            ) THEN
                v_touch := v_touch || v_other.slot_ms;
            END IF;
        END LOOP;
        EXIT WHEN v_touch <@ v_tried;
        IF v_run.token = p_token AND NOT p_slot_ms = ANY (v_tried) THEN
            -- Sent again: it has to be answered, so this one is worth any wait; and it is nobody's to take.
            PERFORM FROM {schema}.runs r
            WHERE r.namespace = p_namespace AND r.job = p_job AND r.slot_ms = p_slot_ms FOR NO KEY UPDATE;
            v_tried := v_tried || p_slot_ms;
            v_locked := v_locked || p_slot_ms;
            CONTINUE;
        END IF;
        v_setting := set_config('lock_timeout', least(p_wait_ms, c_row_wait_ms)::text, true);
        FOREACH v_slot_ms IN ARRAY v_touch LOOP
            CONTINUE WHEN v_slot_ms = ANY (v_tried);
            v_tried := v_tried || v_slot_ms;
            BEGIN
                PERFORM FROM {schema}.runs r
                WHERE r.namespace = p_namespace AND r.job = p_job AND r.slot_ms = v_slot_ms FOR NO KEY UPDATE;
            EXCEPTION WHEN lock_not_available THEN
                CONTINUE;
            END;
            PERFORM FROM {schema}.runs r
            WHERE r.namespace = p_namespace AND r.job = p_job AND r.slot_ms = v_slot_ms FOR UPDATE SKIP LOCKED;
            IF FOUND THEN
                v_locked := v_locked || v_slot_ms;
            END IF;
        END LOOP;
    END LOOP;

    -- A lease end further away than the run's own lease: the clock was set back. It is brought down, whatever follows.
    FOREACH v_other IN ARRAY v_run || v_others LOOP
        CONTINUE WHEN v_other.slot_ms IS NULL;
        IF v_other.status = 'running' AND NOT v_other.released AND v_other.slot_ms = ANY (v_locked)
                AND v_other.lease_end_ms > v_now_ms + v_other.lease_ms THEN
            v_other.lease_end_ms := v_now_ms + v_other.lease_ms;
            UPDATE {schema}.runs r SET lease_end_ms = v_other.lease_end_ms
            WHERE r.namespace = p_namespace AND r.job = p_job AND r.slot_ms = v_other.slot_ms;
        END IF;
        IF v_other.slot_ms = p_slot_ms THEN
            v_run := v_other;
        ELSIF NOT v_other.released AND v_other.lease_end_ms > v_now_ms
                OR v_other.slot_ms = ANY (v_tried) AND NOT v_other.slot_ms = ANY (v_locked) THEN
            v_live := v_other;
        ELSIF v_skip OR v_other.slot_ms < p_slot_ms THEN
            v_doomed := v_doomed || v_other.slot_ms;
        END IF;
    END LOOP;

    IF v_newest_ms > v_now_ms + c_early_ms THEN
        SELECT r.slot_ms INTO v_newest_ms FROM {schema}.runs r
        WHERE r.namespace = p_namespace AND r.job = p_job AND r.slot_ms <= v_now_ms + c_early_ms
        ORDER BY r.slot_ms DESC LIMIT 1;
    END IF;
    v_newer_started := coalesce(v_newest_ms > p_slot_ms, false)
        OR coalesce(p_slot_ms < v_floor_ms AND v_floor_ms <= v_now_ms + c_early_ms, false);

    IF v_run.slot_ms IS NULL THEN
        v_outcome := CASE
            WHEN p_takeover_of IS NOT NULL THEN 'gone'
            WHEN p_slot_ms > v_now_ms + c_early_ms THEN 'early'
            -- Rule 6's second half: this slot's state may have been trimmed, so it may have run already.
            WHEN p_slot_ms <= v_floor_ms THEN CASE WHEN v_skip THEN 'superseded' ELSE 'late' END
            WHEN v_now_ms - p_slot_ms > p_max_late_ms + c_late_tolerance_ms THEN 'late'
            WHEN v_skip AND v_live.slot_ms IS NOT NULL THEN 'overlap'
            WHEN v_skip AND v_newer_started THEN 'superseded'
            ELSE 'won'
        END;
    ELSE
        v_outcome := CASE
            WHEN v_run.status <> 'running' THEN 'finished'
            -- Sent again. After the release nobody listens for the answer, and rule 2 forbids a renewal.
            WHEN v_run.token = p_token THEN CASE WHEN v_run.released THEN 'running' ELSE 'won again' END
            WHEN NOT v_run.released AND v_run.lease_end_ms > v_now_ms OR NOT p_slot_ms = ANY (v_locked) THEN 'running'
            WHEN p_takeover_of IS NOT NULL AND p_takeover_of <> v_run.attempt THEN 'gone'
            WHEN v_newer_started THEN 'superseded run'
            WHEN NOT v_run.released AND v_run.attempt - v_run.handovers >= p_max_attempts THEN 'spent run'
            -- Maybe a late copy of the claim that started an attempt before the latest: one token, one attempt.
            WHEN p_takeover_of IS NULL AND v_run.attempt > 1 THEN 'running'
            WHEN v_skip AND v_live.slot_ms IS NOT NULL THEN 'overlap'
            ELSE 'won'
        END;
    END IF;

    CASE v_outcome
    WHEN 'won again' THEN
        -- The answer to an earlier send was lost. A write, so that a synchronous standby confirms it too.
        v_outcome := 'won';
        UPDATE {schema}.runs r SET lease_end_ms = v_now_ms + r.lease_ms
        WHERE r.namespace = p_namespace AND r.job = p_job AND r.slot_ms = p_slot_ms RETURNING r.* INTO v_answer;
    WHEN 'superseded run', 'spent run' THEN
        UPDATE {schema}.runs r SET status = 'interrupted', ended_ms = v_now_ms,
            error = CASE v_outcome WHEN 'spent run' THEN 'max_attempts' ELSE 'superseded' END
        WHERE r.namespace = p_namespace AND r.job = p_job AND r.slot_ms = p_slot_ms RETURNING r.* INTO v_answer;
        v_outcome := 'interrupted';
    WHEN 'won' THEN
        v_fence := greatest(v_fence + 1, v_now_ms);
        IF v_run.slot_ms IS NULL THEN
            v_limit := least(c_trim_batch, v_kept - cardinality(v_others) - p_history_size);
            IF v_limit > 0 THEN
                v_dropped := ARRAY(
                    SELECT r.slot_ms FROM {schema}.runs r
                    WHERE r.namespace = p_namespace AND r.job = p_job AND r.status <> 'running'
                        AND r.slot_ms < v_now_ms - p_keep_ms - c_late_tolerance_ms - c_trim_margin_ms
                    ORDER BY r.slot_ms LIMIT v_limit
                );
            END IF;
            -- One by one: asked for several at once, a planner without statistics walks through the whole history.
            FOREACH v_slot_ms IN ARRAY v_dropped LOOP
                DELETE FROM {schema}.runs r
                WHERE r.namespace = p_namespace AND r.job = p_job AND r.slot_ms = v_slot_ms;
            END LOOP;
            INSERT INTO {schema}.runs AS r (
                namespace, job, slot_ms, status, attempt, handovers, token, runner, fence, lease_ms, lease_end_ms,
                released, reason, started_ms, past
            ) VALUES (
                p_namespace, p_job, p_slot_ms, 'running', 1, 0, p_token, p_runner, v_fence, p_lease_ms,
                v_now_ms + p_lease_ms, false, p_reason, v_now_ms, '[]'
            ) RETURNING r.* INTO v_answer;
        ELSE
            IF NOT v_skip THEN
                v_doomed := '{}';
            END IF;
            v_run.past := v_run.past || jsonb_build_array(jsonb_build_array(
                v_run.attempt, v_run.runner, v_run.started_ms, v_run.lease_end_ms,
                CASE WHEN v_run.released THEN 'handed-over' ELSE 'expired' END
            ));
            WHILE jsonb_array_length(v_run.past) > c_log_entries LOOP
                v_run.past := v_run.past - 0;
            END LOOP;
            UPDATE {schema}.runs r SET
                attempt = r.attempt + 1, token = p_token, runner = p_runner, fence = v_fence,
                lease_ms = p_lease_ms, lease_end_ms = v_now_ms + p_lease_ms, released = false,
                reason = CASE WHEN r.released THEN 'hand-over' ELSE 'takeover' END,
                started_ms = v_now_ms, past = v_run.past
            WHERE r.namespace = p_namespace AND r.job = p_job AND r.slot_ms = p_slot_ms RETURNING r.* INTO v_answer;
        END IF;
        FOREACH v_slot_ms IN ARRAY v_doomed LOOP
            UPDATE {schema}.runs r SET status = 'interrupted', ended_ms = v_now_ms, error = 'superseded'
            WHERE r.namespace = p_namespace AND r.job = p_job AND r.slot_ms = v_slot_ms;
        END LOOP;
        v_interrupted := v_doomed;
        UPDATE {schema}.jobs j SET
            fence = v_fence,
            floor_ms = greatest(j.floor_ms, v_dropped[cardinality(v_dropped)]),
            kept = j.kept - cardinality(v_dropped) + CASE WHEN v_run.slot_ms IS NULL THEN 1 ELSE 0 END
        WHERE j.namespace = p_namespace AND j.job = p_job;
    WHEN 'overlap' THEN
        v_answer := v_live;
    WHEN 'early' THEN
        v_wait_ms := p_slot_ms - v_now_ms;
    ELSE
        v_answer := v_run;
    END CASE;

    IF v_job_is_new AND v_outcome <> 'won' THEN
        DELETE FROM {schema}.jobs j WHERE j.namespace = p_namespace AND j.job = p_job;
    END IF;
    IF v_epoch IS NULL THEN
        v_epoch := {schema}.epoch_1(p_namespace);
    END IF;
    RETURN json_build_array(
        p_token, v_outcome, v_now_ms, v_epoch, v_wait_ms, v_interrupted,
        CASE WHEN v_answer.slot_ms IS NOT NULL THEN {schema}.run_1(v_answer) END
    );
END
$leaselib$;
