{{/* Values with which Kubernetes refuses an object, or no socket listens on a port. Each message says what to do. */}}
{{- define "torchere.conflicts" -}}
{{- include "torchere.portConflicts" . -}}
{{- include "torchere.rolloutConflicts" . -}}
{{- include "torchere.podConflicts" . -}}
{{- include "torchere.storeConflicts" . -}}
{{- end -}}

{{- define "torchere.portConflicts" -}}
{{- $v := include "torchere.effective" . | fromYaml -}}
{{- $ts := .Values.torchserve | default dict -}}
{{- $theirs := dict "http" "inference_port" "management" "management_port" "metrics" "metrics_port" "grpc" "grpc_inference_port" -}}
{{- $ports := dict -}}
{{- range $name, $port := $v.ports -}}
{{- $old := get $theirs $name -}}
{{- /* A configuration on a claim has its own ports of management, which nothing here names while it is closed. */ -}}
{{- if or $.Values.management.enabled (eq $v.configFrom "chart") (not (has $name (list "management" "grpcManagement"))) -}}
{{- $_ := set $ports (ternary (printf "torchserve.%s" $old) (printf "ports.%s" $name) (hasKey $ts $old)) (int $port) -}}
{{- end -}}
{{- end -}}
{{- if .Values.leaderWorkerSet.enabled -}}
{{- $_ := set $ports "leaderWorkerSet.port" (int .Values.leaderWorkerSet.port) -}}
{{- end -}}
{{- $taken := dict -}}
{{- range $path, $port := $ports -}}
{{- with get $taken (toString $port) -}}
{{- fail (printf "%s and %s are both %d: two sockets of a pod can't listen on one port. Set another." . $path $port) -}}
{{- end -}}
{{- $_ := set $taken (toString $port) $path -}}
{{- end -}}
{{- $s := .Values.service -}}
{{- if eq (include "torchere.httpPort" .) (include "torchere.grpcPort" .) -}}
{{- fail (printf "the Service would have port %s twice, for REST and for gRPC: set service.httpPort or service.grpcPort to another (0: as in ports)." (include "torchere.httpPort" .)) -}}
{{- end -}}
{{- if and (int $s.httpNodePort) (eq (int $s.httpNodePort) (int $s.grpcNodePort)) -}}
{{- fail (printf "service.httpNodePort and service.grpcNodePort are both %d: set another, or 0 for one that the cluster chooses." (int $s.httpNodePort)) -}}
{{- end -}}
{{- range $name := list "http" "grpc" -}}
{{- $port := get $s (printf "%sPort" $name) | int -}}
{{- $listening := get $v.ports $name | int -}}
{{- if and $s.headless $port (ne $port $listening) -}}
{{- fail (printf "service.%sPort is %d, and a headless Service leads clients to the pods themselves, which listen on %d: leave service.%sPort 0, or turn service.headless off." $name $port $listening $name) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "torchere.rolloutConflicts" -}}
{{- $deployment := not .Values.leaderWorkerSet.enabled -}}
{{- $strategy := .Values.strategy | default dict -}}
{{- $rolling := $strategy.rollingUpdate | default dict -}}
{{- $none := "^0+%?$" -}}
{{- if and $deployment (ne ($strategy.type | default "") "Recreate") (regexMatch $none (toString $rolling.maxSurge)) (regexMatch $none (toString $rolling.maxUnavailable)) -}}
{{- fail "strategy.rollingUpdate has maxSurge 0 and maxUnavailable 0: no pod could be replaced. Set one of them above 0, like {maxSurge: 0, maxUnavailable: 1}." -}}
{{- end -}}
{{- if and $deployment (le (int .Values.progressDeadlineSeconds) (int .Values.minReadySeconds)) -}}
{{- fail (printf "progressDeadlineSeconds is %v, not above minReadySeconds, %v: every rollout would fail. Set it above, and as long as the longest load of all models." .Values.progressDeadlineSeconds .Values.minReadySeconds) -}}
{{- end -}}
{{- $sleep := dig "preStop" "sleep" "seconds" 0 (.Values.lifecycle | default dict) | int -}}
{{- /* How long the server drains is unknown where a claim has the configuration. */ -}}
{{- $fromChart := eq (include "torchere.effective" . | fromYaml).configFrom "chart" -}}
{{- $needed := add $sleep (ternary (add (ceil .Values.server.drainDelaySeconds) (ceil .Values.server.drainTimeoutSeconds)) 0 $fromChart) -}}
{{- if and $sleep (ge (int $needed) (include "torchere.grace" . | int)) -}}
{{- fail (printf "lifecycle.preStop.sleep.seconds is %d: the pod would be killed %s s after it was told to end, before it has slept and drained. Set terminationGracePeriodSeconds above %d, or sleep less." $sleep (include "torchere.grace" .) $needed) -}}
{{- end -}}
{{- end -}}

{{- define "torchere.podConflicts" -}}
{{- $resources := include "torchere.resources" . | fromYaml -}}
{{- range $name, $request := $resources.requests -}}
{{- $limit := get $resources.limits $name -}}
{{- if and (hasKey $resources.limits $name) (gt (include "torchere.quantity" $request | float64) (include "torchere.quantity" $limit | float64)) -}}
{{- fail (printf "resources.requests.%s is %v, more than resources.limits.%s, %v: raise the limit, or request less." $name $request $name $limit) -}}
{{- end -}}
{{- end -}}
{{- $volumes := list -}}
{{- range include "torchere.volumes" . | fromYamlArray -}}
{{- if has .name $volumes -}}
{{- fail (printf "extraVolumes: the pod would have two volumes of the name %s. Name yours otherwise." .name) -}}
{{- end -}}
{{- $volumes = append $volumes .name -}}
{{- end -}}
{{- $mounted := dict -}}
{{- range include "torchere.mounts" . | fromYamlArray -}}
{{- $path := .mountPath | default "" | clean -}}
{{- if hasKey $mounted $path -}}
{{- fail (printf "extraVolumeMounts: %s is mounted already, from the volume %s. Mount %s on a path of its own." $path (get $mounted $path) .name) -}}
{{- end -}}
{{- $_ := set $mounted $path .name -}}
{{- end -}}
{{- end -}}

{{- define "torchere.storeConflicts" -}}
{{- $url := .Values.modelStore.s3.endpointUrl -}}
{{- $policy := .Values.networkPolicy -}}
{{- if and $policy.enabled $url (eq (include "torchere.effective" . | fromYaml).storeType "s3") -}}
{{- $port := regexFind ":[0-9]+$" (urlParse $url).host | trimPrefix ":" | default (ternary "443" "80" (hasPrefix "https:" $url)) | int -}}
{{- $open := false -}}
{{- range concat ($policy.storeEgress | default list) ($policy.extraEgress | default list) -}}
{{- range .ports | default (list dict) -}}
{{- /* A rule without a port opens all ports. A port's name has a meaning in the store's pods only, and counts as open. */ -}}
{{- $first := .port | default 0 | int -}}
{{- $last := .endPort | default $first | int -}}
{{- if and (ne (.protocol | default "TCP") "UDP") (or (eq $first 0) (and (le $first $port) (ge $last $port))) -}}{{- $open = true -}}{{- end -}}
{{- end -}}
{{- end -}}
{{- if not $open -}}
{{- fail (printf "modelStore.s3.endpointUrl is on port %d, which no rule of networkPolicy.storeEgress opens: the copy would not reach the store. Set networkPolicy.storeEgress: [{ports: [{protocol: TCP, port: %d}]}]." $port $port) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* A Kubernetes quantity of the schema's form, 500m or 4Gi, as a number. */}}
{{- define "torchere.quantity" -}}
{{- $text := toString . -}}
{{- $unit := regexFind "[a-zA-Z]+$" $text -}}
{{- $scales := dict "" 1 "m" 0.001 "k" 1000 "M" 1000000 "G" 1000000000 "T" 1000000000000 "Ki" 1024 "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776 -}}
{{- mulf (trimSuffix $unit $text | float64) (get $scales $unit) -}}
{{- end -}}
